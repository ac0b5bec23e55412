#include <optional>

#include "base/text.hpp"
#include "deep_ep/arguments.hpp"
#include "deep_ep/low_latency.hpp"
#include "dispatch.hpp"
#include "ferry/error.hpp"
#include "format/encoding.hpp"
#include "host_parts.hpp"
#include "interpreter.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

// The results of a dispatch, in new memory.
struct Received {
  nb::object values, scales, counts, plan;
  ReceiveBuffers memory;

  Received(const LowLatencyPool& pool, const Format& format, const NewArrays& arrays) {
    const PartTimer timer(HostPart::allocation);
    const bool nvfp4 = encoding_of(format).is_two_level(), fp8 = format.quantises() && !nvfp4;
    values = arrays.make(nvfp4 ? pool.nvfp4_values : fp8 ? pool.fp8_values : pool.values, memory.parts[0]);
    if (nvfp4) scales = arrays.make(pool.nvfp4_scales, memory.parts[1]);
    if (fp8) scales = arrays.make(format.fp8.packed ? pool.packed_scales : pool.scales, memory.parts[1]);
    counts = arrays.make(pool.counts, memory.counts);
    plan = arrays.make(pool.plan, memory.plan);
  }

  nb::object recv_x() const {
    return scales.is_valid() ? nb::object(nb::make_tuple(values, scales)) : values;
  }

  std::vector<nb::object> all() const {
    std::vector<nb::object> arrays = {values, counts, plan};
    if (scales.is_valid()) arrays.push_back(scales);
    return arrays;
  }
};

constexpr const char* kFactor = "x_global_scale";

// g = 1 / factor, positive and finite.
float inverse(double factor) {
  if (factor >= 0x1p-127 && factor <= 0x1p127) return static_cast<float>(1 / factor);
  throw UsageError(str(kFactor, " = ", factor, ": must be positive and finite, from 2^-127 to 2^127: pass ",
                       "2688 / largest |x|"));
}

// g of NVFP4 from the caller's factor 1 / g: a number, or an array whose values are all the same.
float scale_of_factor(const nb::object& factor, DispatchInput& in) {
  if (const std::optional<double> number = number_in(factor, kFactor)) return inverse(*number);
  const Array& array = in.arguments.add(factor, kFactor);
  require_dense(array, kFactor);
  std::int64_t values = 1;
  for (const std::int64_t length : array.shape) values *= length;
  if (array.element != kFp32 || values == 0) {
    throw UsageError(str(kFactor, ": expected a number or float32 values, got ", name_of(array.element), " ",
                         shape_text(array.shape)));
  }
  const auto* const factors = static_cast<const float*>(array.data);
  for (std::int64_t i = 1; i < values; ++i) {
    if (factors[i] == factors[0]) continue;
    throw UsageError(str(kFactor, ": values ", factors[0], " and ", factors[i],
                         " differ, but a token has one factor: pass one, or call Exchange.dispatch with "
                         "input_scales"));
  }
  return inverse(factors[0]);
}

// g on the device of the tensor `x`, where a factor that is a tensor lies too: the host need not wait for it.
nb::object scale_on_device(const nb::object& x, const nb::object& factor) {
  if (const std::optional<double> number = number_in(factor, kFactor))
    return x.attr("new_full")(nb::make_tuple(1), inverse(*number),
                              "dtype"_a = type_object(Framework::torch, kFp32));
  return nb::float_(1.0) / factor.attr("reshape")(-1)[nb::slice(0, 1)];
}

void check_values(const Array& x, const Format& format, int max_tokens) {
  if (x.shape[0] > max_tokens) {
    throw UsageError(str("x: ", counted(x.shape[0], "token"), ", but num_max_dispatch_tokens_per_rank = ",
                         max_tokens, ": pass fewer, or on every rank a larger number"));
  }
  if (const int whole = format.quantises() ? encoding_of(format).is_two_level() ? 32 : 16 : 1;
      x.shape[1] % whole != 0) {
    throw UsageError(str("x: expected a hidden size that is a multiple of ", whole, " with ",
                         whole == 32 ? "use_nvfp4" : "use_fp8", ", got shape ", shape_text(x.shape)));
  }
  if (format.quantises() || x.element == kBf16) return;
  throw UsageError(str("x: expected bfloat16 with use_fp8=False, got ", name_of(x.element)));
}

}  // namespace

Format LowLatencyFormat::format() const {
  // Callers pass the options of fp8 with use_nvfp4 too, where they mean nothing.
  if (is_true(use_nvfp4)) {
    if (is_true(use_ue8m0_for_sf))
      throw UnsupportedError("low_latency_dispatch: use_ue8m0_for_sf: scales of NVFP4 are e4m3");
    return Format::nvfp4({.tiles = true});
  }
  const bool power_of_two = is_true(round_scale), packed = is_true(use_ue8m0);
  if (packed && !power_of_two)
    throw UsageError("use_ue8m0 needs round_scale: an exponent can only represent a power of two");
  if (!is_true(use_fp8)) return {};
  return {.kind = FormatKind::fp8_e4m3,
          .fp8 = {.column_major = true, .power_of_two = power_of_two, .packed = packed}};
}

nb::tuple LowLatencyCalls::dispatch(const nb::object& x, const nb::object& topk_idx,
                                    const nb::object& max_tokens, const nb::object& experts,
                                    const nb::object& stats, const LowLatencyFormat& format,
                                    const nb::object& with_async_finish, const nb::object& with_hook) {
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  require_open();
  Array tokens, ids;
  const auto pool = read_or_refuse(Operation::dispatch, [&] {
    tokens = inspect_matrix(x, "x");
    ids = inspect_matrix(topk_idx, "topk_idx");
    require_element(tokens, "x", {kBf16, kFp16, kFp32});
    require_element(ids, "topk_idx", {kInt32, kInt64});
    require_whole_rows(tokens, "x");
    require_slots(ids);
    return pool_of(
        {.max_tokens = integer_from(1, max_tokens, "num_max_dispatch_tokens_per_rank", kMostTokens),
         .hidden = static_cast<int>(tokens.shape[1]),
         .experts = integer_from(1, experts, "num_experts", kMostExperts),
         .top_k = static_cast<int>(ids.shape[1]),
         .on_device = !is_host(tokens.device)});
  });
  PooledExchange& used = pools_->acquire(*pool);
  last_ = pool;
  LaneCall call(*used.exchange, 0);
  const Stream current = stream_of(nb::none(), tokens.framework, call.device());
  call.set_stream(current);
  DispatchInput in(call.device(), Gradients::recorded);
  std::optional<Received> received;
  bool async_finish = false, hooked = false;
  call.read_or_refuse({Operation::dispatch}, [&] {
    async_finish = is_true(with_async_finish);
    hooked = is_true(with_hook);
    refuse_hook_with_event(async_finish, hooked);
    in.options.format = format.format();
    const Array& rows =
        in.arguments.rows(dense_array(x, tokens), "x", pool->shape.hidden, {kBf16, kFp16, kFp32});
    in.tokens = Tokens::rows(rows.data, rows.shape[0], *value_type_of(rows.element), 0);
    check_values(rows, *in.options.format, pool->shape.max_tokens);
    in.ids = ids_of(in.arguments.add(dense_array(topk_idx, ids), "topk_idx"), rows.shape[0],
                    pool->shape.top_k, "topk_idx");
    if (encoding_of(*in.options.format).is_two_level() && !format.x_global_scale.is_none()) {
      if (pool->shape.on_device) {
        const Array& scale =
            in.arguments.dense(scale_on_device(x, format.x_global_scale), kFactor, kFp32, {1});
        in.options.global_scale = static_cast<const float*>(scale.data);
      } else {
        in.global_scale = scale_of_factor(format.x_global_scale, in);
        in.options.global_scale = &in.global_scale;
      }
    }
    received.emplace(*pool, *in.options.format, NewArrays(tokens.framework, call.device()));
    if (stats.is_none()) return;
    const char* const name = "cumulative_local_expert_recv_stats";
    const Array& sums = in.arguments.dense(stats, name, kInt32, {pool->local_experts});
    require_writable(sums, name);
    received->memory.count_sums = static_cast<std::int32_t*>(sums.data);
  });
  in.options.memory = received->memory;
  timer.emplace(HostPart::streams);
  const Stream stream = streams().begin(call.device(), current, nullptr, async_finish);
  call.set_stream(stream);
  timer.emplace(HostPart::exchange);
  pools_->run(*pool, used, [&] {
    const GilRelease unlocked;
    dispatch_in_own_words([&] {
      if (hooked) {
        call.exchange().dispatch_send(in.tokens, in.ids, nullptr, in.options, stream);
      } else {
        call.exchange().dispatch(in.tokens, in.ids, nullptr, in.options, stream);
      }
    });
  });
  timer.emplace(HostPart::results);
  PyPlan plan{.plan = Plan::over(received->memory.plan, static_cast<std::size_t>(pool->plan.lengths[0])),
              .owner = received->plan,
              .framework = tokens.framework,
              .device = call.device(),
              .shape = pool->plan_shape,
              .tokens = in.tokens.count,
              .storage_writes = write_count(received->memory.plan)};
  nb::object handle = nb::cast(LowLatencyHandle{
      .pool = pool, .exchange = used.owner, .plan = std::move(plan), .received = !hooked, .ids = ids});
  std::vector<nb::object> arrays = received->all();
  for (nb::object& owner : in.arguments.owners()) arrays.push_back(std::move(owner));
  nb::object hook = nb::none();
  if (hooked) {
    hook = nb::cast(ReceiveHook(streams_, pools_, pool, used, stream, handle));
    used.exchange->pending(0).owners = std::move(arrays);
    arrays.clear();
  }
  return nb::make_tuple(received->recv_x(), received->counts, std::move(handle),
                        finish(call.device(), stream, current, async_finish, std::move(arrays)),
                        std::move(hook));
}

}  // namespace ferry::python
