// The low-latency calls of ferry.deep_ep: their exchanges, dispatch, combine, and how Python calls them.
#include "deep_ep/low_latency.hpp"

#include <algorithm>
#include <optional>

#include "base/errors.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "cast.hpp"
#include "combine.hpp"
#include "deep_ep/arguments.hpp"
#include "dispatch.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "host_parts.hpp"
#include "interpreter.hpp"

namespace ferry::python {

using namespace nb::literals;

void LowLatencyPool::learn(const PyExchange& exchange) {
  const Config& config = exchange.config();
  plan_shape = ferry::plan_shape(config);
  local_experts = exchange.receive_sizes().groups;
  capacity = exchange.state().exchange.capacity();
  const Shape rows = {local_experts, capacity, config.hidden};
  values = {kBf16, rows};
  fp8_values = {kFp8, rows};
  // Neighbouring rows are neighbours in memory, and each expert has columns of its own.
  const std::int64_t column = align_up(capacity, kColumnAlignment);
  const auto strides = [&](std::int64_t columns) { return Shape{columns * column, 1, column}; };
  const std::int64_t blocks = (config.hidden + 127) / 128, words = (config.hidden + 511) / 512;
  scales = {kFp32, {local_experts, capacity, blocks}, strides(blocks)};
  packed_scales = {kInt32, {local_experts, capacity, words}, strides(words)};
  // As DeepEP returns them: [R*M, H/2, L] and [32, 4, rows of tiles, 4, tiles, L], with the last dimension
  // first in memory and then the third, the fifth, the first, the second and the fourth.
  const std::int64_t half = config.hidden / 2, wide = (config.hidden + 63) / 64, tall = row_tiles(capacity);
  nvfp4_values = {kByte, {capacity, half, local_experts}, {half, 1, capacity * half}};
  nvfp4_scales = {kFp8,
                  {32, 4, tall, 4, wide, local_experts},
                  {16, 4, wide * kTileBytes, 1, kTileBytes, tall * wide * kTileBytes}};
  counts = {kInt32, {local_experts}};
  plan = {kByte, {exchange.receive_sizes().plan_bytes}};
}

bool LowLatencyPool::may_acquire() const {
  const auto busy =
      std::count_if(exchanges.begin(), exchanges.end(), [](const auto& each) { return each->busy; });
  return static_cast<std::size_t>(busy) < kMost;
}

void LowLatencyPool::add(nb::object made) {
  auto& exchange = nb::cast<PyExchange&>(made);
  if (exchanges.empty()) learn(exchange);
  exchanges.push_back(std::make_unique<PooledExchange>(PooledExchange{std::move(made), &exchange}));
}

PooledExchange& LowLatencyPools::acquire(LowLatencyPool& pool) {
  for (const auto& exchange : pool.exchanges) {
    if (exchange->busy) continue;
    exchange->others_refused = &pool != last_ && !pool.shape.on_device;
    if (exchange->others_refused) refuse_others(exchange.get());
    last_ = &pool;
    return *exchange;
  }
  if (!pool.may_acquire()) {
    throw UsageError(
        str(LowLatencyPool::kMost,
            " low-latency calls wait for their hooks to be called, which is the most there may be"));
  }
  make_one(pool, nullptr);
  return *pool.exchanges.back();
}

void LowLatencyPools::make_one(LowLatencyPool& pool, const PooledExchange* refused) {
  if (refused == nullptr || !refused->others_refused) refuse_others(refused);
  last_ = nullptr;
  const LowLatencyShape& shape = pool.shape;
  pool.add(make(shape.on_device, shape.max_tokens, shape.hidden, shape.experts, shape.top_k));
  last_ = &pool;
}

void LowLatencyPools::refuse_others(const PooledExchange* used) {
  std::vector<PooledExchange*> others;
  for (const auto& each : all) {
    for (const auto& exchange : each->exchanges)
      if (exchange.get() != used) others.push_back(exchange.get());
  }
  for (PooledExchange* const other : others) {
    ++other->owed;
    if (!other->busy) settle(*other);
  }
}

void LowLatencyPools::settle(PooledExchange& exchange) {
  if (exchange.owed == 0) return;
  LaneCall call(*exchange.exchange, 0);
  const Framework framework = is_host(call.device()) ? Framework::numpy : Framework::torch;
  call.set_stream(stream_of(nb::none(), framework, call.device()));
  const GilRelease unlocked;
  for (; exchange.owed > 0; --exchange.owed)
    call.exchange().refuse(Operation::dispatch, UsageError(kMustAgree), call.options());
}

void LowLatencyHandle::require_received() const {
  if (received) return;
  throw UsageError("low-latency handle: the rows have not been received: call the dispatch's hook first");
}

ReceiveHook::ReceiveHook(nb::object streams, std::shared_ptr<LowLatencyPools> pools,
                         std::shared_ptr<LowLatencyPool> pool, PooledExchange& used, Stream stream,
                         nb::object handle)
    : streams_(std::move(streams)),
      pools_(std::move(pools)),
      pool_(std::move(pool)),
      used_(&used),
      stream_(stream),
      handle_(std::move(handle)) {
  used.busy = true;
}

void ReceiveHook::receive() {
  LaneCall call(*used_->exchange, 0);
  nb::cast<CallStreams&>(streams_).follow(call.device(), stream_);
  call.set_stream(stream_);
  const PartTimer timer(HostPart::exchange);
  const GilRelease unlocked;
  if (handle_.is_none()) {
    combine_in_own_words([&] { call.exchange().combine_receive({.stream = stream_}); });
  } else {
    dispatch_in_own_words([&] { call.exchange().dispatch_receive({.stream = stream_}); });
  }
}

// The exchange then serves other calls, even if the phase failed.
void ReceiveHook::call() {
  if (!pending_)  // another call may be using the exchange by now
    throw UsageError("hook: was called before; it receives a call's rows once");
  pending_ = false;
  used_->busy = false;
  LowLatencyHandle* const handle = handle_.is_none() ? nullptr : &nb::cast<LowLatencyHandle&>(handle_);
  pools_->run(*pool_, *used_, [&] {
    try {
      receive();
    } catch (const Error& error) {
      // After bad ids the rows that could be sent were received, in arrays that the caller already has.
      if (handle != nullptr) handle->received = LaneCall::delivers_result(error);
      if (used_->exchange->shared()) used_->exchange->pending(0) = {};
      throw;
    }
  });
  if (handle != nullptr) handle->received = true;
  used_->exchange->pending(0) = {};
}

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
  in.options.call = call.options();
  timer.emplace(HostPart::exchange);
  pools_->run(*pool, used, [&] {
    const GilRelease unlocked;
    dispatch_in_own_words([&] {
      if (hooked) {
        call.exchange().dispatch_send(in.tokens, in.ids, nullptr, in.options);
      } else {
        call.exchange().dispatch(in.tokens, in.ids, nullptr, in.options);
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

namespace {

LowLatencyHandle& handle_of(const nb::object& object) {
  return cast_argument<LowLatencyHandle>(object, "handle", "a handle of low_latency_dispatch");
}

void read_rows(const nb::object& x, const LowLatencyPool& pool, CombineInput& in) {
  const Array& array = in.arguments.rows(x, "x", pool.shape.hidden, {kBf16, kFp16, kFp32});
  if (array.shape != pool.values.lengths) {
    throw UsageError(str("x: expected shape [L, R*M, H] = ", shape_text(pool.values.lengths), ", got ",
                         shape_text(array.shape)));
  }
  const StridedRows rows = strided_rows(array, "x");
  in.outputs = {array.data, *value_type_of(array.element), rows.stride, rows.count};
}

// The weights, 0 for slots that are -1 in topk_idx. The dispatch has left out those of its own topk_idx.
nb::object weights_of_slots(const nb::object& topk_idx, const nb::object& topk_weights,
                            const Array& sent_ids) {
  const Array weights = inspect(topk_weights, "topk_weights");
  const Array ids = inspect_matrix(topk_idx, "topk_idx");
  if (ids.data == sent_ids.data && ids.shape == sent_ids.shape && ids.strides == sent_ids.strides)
    return dense_array(topk_weights, weights);
  if (ids.shape != weights.shape) {
    throw UsageError(
        str("topk_idx: expected shape ", shape_text(weights.shape), ", got ", shape_text(ids.shape)));
  }
  static CachedAttribute masked;
  return masked.get("ferry.deep_ep._layout", "masked_weights")(topk_idx, topk_weights);
}

void read_combine(const nb::object& x, const nb::object& topk_idx, const nb::object& topk_weights,
                  const LowLatencyHandle& handle, const nb::object& out, const PyExchange& exchange,
                  CombineInput& in) {
  const LowLatencyPool& pool = *handle.pool;
  handle.require_received();
  in.plan = &handle.plan;
  read_rows(x, pool, in);
  const Framework framework = in.arguments.framework();
  require_torch_or_numpy(framework, "x");
  const Array& weights = in.arguments.dense(weights_of_slots(topk_idx, topk_weights, handle.ids),
                                            "topk_weights", kFp32, {in.plan->tokens, pool.shape.top_k});
  in.options.topk_weights = static_cast<const float*>(weights.data);
  in.options.topk_weighted = true;
  const Shape shape = {in.plan->tokens, pool.shape.hidden};
  in.result_array = out.is_none() ? new_array(framework, kBf16, shape, exchange.state().device) : out;
  read_result(shape, "out", in);
}

}  // namespace

nb::tuple LowLatencyCalls::combine(const nb::object& x, const nb::object& topk_idx,
                                   const nb::object& topk_weights, const nb::object& handle_object,
                                   const nb::object& use_logfmt, const nb::object& with_zero_copy,
                                   const nb::object& with_async_finish, const nb::object& with_hook,
                                   const nb::object& out) {
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  require_open();
  const LowLatencyHandle& handle =
      *read_or_refuse(Operation::combine, [&] { return &handle_of(handle_object); });
  PooledExchange& used = pools_->acquire(*handle.pool);
  last_ = handle.pool;
  LaneCall call(*used.exchange, 0);
  const Stream current = stream_of(nb::none(), handle.plan.framework, call.device());
  call.set_stream(current);
  CombineInput in(call.device(), Gradients::recorded);
  bool async_finish = false, hooked = false;
  call.read_or_refuse({Operation::combine}, [&] {
    async_finish = is_true(with_async_finish);
    hooked = is_true(with_hook);
    const bool zero_copy = is_true(with_zero_copy);
    refuse_hook_with_event(async_finish, hooked);
    in.options.reduction = hooked ? Reduction::exact : Reduction::partial;
    if (is_true(use_logfmt) && zero_copy)
      throw UsageError("low_latency_combine: use_logfmt and zero_copy exclude each other");
    if (zero_copy && handle.combine_buffer.is_none()) {
      throw UsageError(
          "low_latency_combine: zero_copy needs rows written to get_next_low_latency_combine_buffer(handle)");
    }
    read_combine(zero_copy ? handle.combine_buffer : x, topk_idx, topk_weights, handle, out, *used.exchange,
                 in);
  });
  timer.emplace(HostPart::streams);
  const Stream stream = streams().begin(call.device(), current, nullptr, async_finish);
  call.set_stream(stream);
  in.options.call = call.options();
  timer.emplace(HostPart::exchange);
  pools_->run(*handle.pool, used, [&] {
    const GilRelease unlocked;
    combine_in_own_words([&] {
      if (hooked) {
        call.exchange().combine_send(in.outputs, in.plan->plan, in.result, in.options);
      } else {
        call.exchange().combine(in.outputs, in.plan->plan, in.result, in.options);
      }
    });
  });
  timer.emplace(HostPart::results);
  std::vector<nb::object> arrays = in.arguments.owners();
  arrays.push_back(handle.plan.owner);
  nb::object hook = nb::none();
  if (hooked) {
    hook = nb::cast(ReceiveHook(streams_, pools_, handle.pool, used, stream, nb::none()));
    used.exchange->pending(0) = {.owners = std::move(arrays), .result = in.result_array};
    arrays.clear();
  }
  return nb::make_tuple(in.result_array,
                        finish(call.device(), stream, current, async_finish, std::move(arrays)),
                        std::move(hook));
}

nb::object LowLatencyCalls::next_combine_buffer(const nb::object& handle_object) {
  require_open();
  LowLatencyHandle& handle = handle_of(handle_object);
  if (handle.combine_buffer.is_none()) {
    handle.combine_buffer =
        new_array(handle.plan.framework, kBf16, handle.pool->values.lengths, handle.plan.device);
  }
  return handle.combine_buffer;
}

void LowLatencyCalls::require_open() const {
  if (closed_) throw UsageError("Buffer: used after destroy()");
}

std::shared_ptr<LowLatencyPool> LowLatencyCalls::pool_of(const LowLatencyShape& shape) {
  for (const auto& pool : pools_->all) {
    if (pool->shape == shape) return pool;
  }
  return pools_->all.emplace_back(std::make_shared<LowLatencyPool>(shape));
}

void LowLatencyCalls::refuse(Operation operation, const nb::object& error) {
  if (last_ && last_->may_acquire()) {
    LaneCall call(*pools_->acquire(*last_).exchange, 0);
    call.set_stream(
        stream_of(nb::none(), last_->shape.on_device ? Framework::torch : Framework::numpy, call.device()));
    call.read_or_refuse({operation}, [&] { raise(error); });
  } else if (!last_ && operation == Operation::dispatch) {
    // The peers' hosts gather their arguments. Before the first dispatch no rank has a handle to combine.
    python_.attr("refuse_first_low_latency")(error);
  }
  raise(error);
}

nb::object LowLatencyCalls::finish(Device device, Stream stream, Stream current, bool async_finish,
                                   std::vector<nb::object> used) {
  if (!async_finish) return event_overlap(nb::none());
  const PartTimer timer(HostPart::streams);
  return streams().end(device, stream, current, std::move(used));
}

namespace {

// An element of (src_info, layout_range, M, H, E).
nb::object low_latency_element(const nb::object& self, Py_ssize_t index) {
  auto& handle = nb::cast<LowLatencyHandle&>(self);
  const LowLatencyShape& shape = handle.pool->shape;
  if (index == 2) return nb::int_(shape.max_tokens);
  if (index == 3) return nb::int_(shape.hidden);
  if (index == 4) return nb::int_(shape.experts);
  nb::object& made = handle.elements[index];
  if (made.is_valid()) return made;
  handle.require_received();
  static CachedAttribute src_info, layout_range;
  constexpr const char* kModule = "ferry.deep_ep._layout";
  made =
      index == 0 ? src_info.get(kModule, "src_info")(self) : layout_range.get(kModule, "layout_range")(self);
  return made;
}

nb::object low_latency_item(const nb::object& self, const nb::object& index) {
  return item_of(index, 5, [&](Py_ssize_t at) { return low_latency_element(self, at); });
}

constexpr const char* kDispatchSignature =
    "def dispatch(self, x: typing.Any, topk_idx: typing.Any, max_tokens: typing.Any, experts: typing.Any, "
    "stats: typing.Any, use_fp8: typing.Any, round_scale: typing.Any, use_ue8m0: typing.Any, "
    "use_nvfp4: typing.Any, x_global_scale: typing.Any, use_ue8m0_for_sf: typing.Any, async_finish: "
    "typing.Any, hooked: typing.Any) -> tuple";
constexpr const char* kCombineSignature =
    "def combine(self, x: typing.Any, topk_idx: typing.Any, topk_weights: typing.Any, handle: typing.Any, "
    "use_logfmt: typing.Any, zero_copy: typing.Any, async_finish: typing.Any, hooked: typing.Any, "
    "out: typing.Any) -> tuple";

}  // namespace

void bind_low_latency(nb::module_& module) {
  nb::class_<LowLatencyHandle>(
      module, "LowLatencyHandle",
      "(src_info, layout_range, M, H, E) of a low-latency dispatch; the first two are computed on first "
      "access.")
      .def("__len__", [](const LowLatencyHandle&) { return 5; })
      .def("__getitem__", &low_latency_item, "index"_a,
           nb::sig("def __getitem__(self, index: typing.Any) -> typing.Any"))
      .def_ro("exchange", &LowLatencyHandle::exchange, "The Exchange that the dispatch used.",
              nb::sig("def exchange(self) -> Exchange"))
      .def_ro("plan", &LowLatencyHandle::plan, "The Plan of the dispatch.")
      .def_prop_ro(
          "shape",
          [](const LowLatencyHandle& self) {
            return nb::make_tuple(self.pool->local_experts, self.pool->capacity);
          },
          "(L, R*M).", nb::sig("def shape(self) -> tuple[int, int]"));
  nb::class_<ReceiveHook>(
      module, "ReceiveHook",
      "Runs the receive phase of a low-latency call, once, on the stream that was current "
      "when the call was made.")
      .def("__call__", &ReceiveHook::call);
  nb::class_<LowLatencyCalls>(module, "_LowLatencyCalls",
                              "For ferry.deep_ep: the low-latency calls of a Buffer.")
      .def(nb::init<nb::object, nb::object>(), "streams"_a, "exchanges"_a)
      .def(
          "dispatch",
          [](LowLatencyCalls& self, const nb::object& x, const nb::object& topk_idx,
             const nb::object& max_tokens, const nb::object& experts, const nb::object& stats,
             const nb::object& use_fp8, const nb::object& round_scale, const nb::object& use_ue8m0,
             const nb::object& use_nvfp4, const nb::object& x_global_scale,
             const nb::object& use_ue8m0_for_sf, const nb::object& async_finish, const nb::object& hooked) {
            return self.dispatch(
                x, topk_idx, max_tokens, experts, stats,
                {use_fp8, round_scale, use_ue8m0, use_nvfp4, x_global_scale, use_ue8m0_for_sf}, async_finish,
                hooked);
          },
          "x"_a.none(), "topk_idx"_a.none(), "max_tokens"_a.none(), "experts"_a.none(), "stats"_a.none(),
          "use_fp8"_a.none(), "round_scale"_a.none(), "use_ue8m0"_a.none(), "use_nvfp4"_a.none(),
          "x_global_scale"_a.none(), "use_ue8m0_for_sf"_a.none(), "async_finish"_a.none(), "hooked"_a.none(),
          nb::sig(kDispatchSignature))
      .def(
          "combine",
          [](LowLatencyCalls& self, const nb::object& x, const nb::object& topk_idx,
             const nb::object& topk_weights, const nb::object& handle, const nb::object& use_logfmt,
             const nb::object& zero_copy, const nb::object& async_finish, const nb::object& hooked,
             const nb::object& out) {
            return self.combine(x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish,
                                hooked, out);
          },
          "x"_a.none(), "topk_idx"_a.none(), "topk_weights"_a.none(), "handle"_a.none(),
          "use_logfmt"_a.none(), "zero_copy"_a.none(), "async_finish"_a.none(), "hooked"_a.none(),
          "out"_a.none(), nb::sig(kCombineSignature))
      .def("next_combine_buffer", &LowLatencyCalls::next_combine_buffer, "handle"_a.none(),
           nb::sig("def next_combine_buffer(self, handle: typing.Any) -> typing.Any"))
      .def("close", &LowLatencyCalls::close);
}

}  // namespace ferry::python
