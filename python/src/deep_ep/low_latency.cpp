// The low-latency calls of ferry.deep_ep: dispatch and combine, each one call from Python.
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/errors.hpp"
#include "bindings.hpp"
#include "cast.hpp"
#include "combine.hpp"
#include "deep_ep/low_latency_pool.hpp"
#include "deep_ep/streams.hpp"
#include "dispatch.hpp"
#include "ferry/error.hpp"
#include "format/encoding.hpp"
#include "host_parts.hpp"
#include "interpreter.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

// The arguments of a dispatch and of a combine, unread. use_nvfp4 goes before use_fp8; x_global_scale is
// 1 / g.
struct LowLatencyDispatch {
  const nb::object &x, &topk_idx, &max_tokens, &experts, &stats;
  const nb::object &use_fp8, &round_scale, &use_ue8m0, &use_nvfp4, &x_global_scale, &use_ue8m0_for_sf;
  const nb::object &async_finish, &hooked;
};
struct LowLatencyCombine {
  const nb::object &x, &topk_idx, &topk_weights, &handle, &use_logfmt, &zero_copy, &async_finish, &hooked,
      &out;
};

// The Python class of handles: (src_info, layout_range, M, H, E). Python computes the first two on first
// access.
struct LowLatencyHandle {
  std::shared_ptr<LowLatencyPool> pool;
  nb::object exchange;  // the one that the dispatch used
  PyPlan plan;
  bool received = false;  // false: the dispatch's hook has not been called
  Array ids;              // topk_idx as passed to dispatch
  nb::object combine_buffer = nb::none();
  nb::object elements[2]{};  // src_info and layout_range, once computed

  void require_received() const {
    if (received) return;
    throw UsageError("low-latency handle: the rows have not been received: call the dispatch's hook first");
  }
};

// Runs a dispatch, or a phase of it. Its findings that name settings of Ferry are told in the words of the
// interface.
template <class Dispatch>
void dispatch_in_own_words(Dispatch dispatch) {
  static constexpr Phrase kWords[] = {
      {": format is ", ": the format that use_fp8, round_scale, use_ue8m0 and use_nvfp4 choose is "},
      {"tokens: ", "x: "}};
  try {
    in_words(kWords, dispatch);
  } catch (const OverflowError& error) {
    const Overflow& found = error.overflow;
    throw OverflowError(
        str("topk_idx: some token lists an expert more than once: an expert of rank ", found.rank, " needs ",
            counted(found.needed, "row"), " and has R*M = ", found.capacity,
            "; routes dropped on all ranks: ", found.dropped, ": list an expert at most once for a token"),
        found);
  } catch (const UsageError& error) {
    if (std::string_view(error.what()).rfind("dispatch: global_scale", 0) != 0) throw;
    throw UsageError(
        "x_global_scale: so small that the scale of a block overflows: pass 2688 / largest |x|; the blocks "
        "concerned have scale 7F and values 0");
  }
}

// Runs a combine, or its receive phase, likewise. With a hook the reduction is exact, else partial.
template <class Combine>
void combine_in_own_words(Combine combine) {
  static constexpr Phrase kWords[] = {{"result (", "out ("},
                                      {"outputs (", "x ("},
                                      {"result: ", "out: "},
                                      {"outputs: ", "x: "},
                                      {"reduction is partial on rank ", "return_recv_hook is False on rank "},
                                      {"reduction is exact on rank ", "return_recv_hook is True on rank "},
                                      {" and partial on rank ", " and False on rank "},
                                      {" and exact on rank ", " and True on rank "}};
  in_words(kWords, combine);
}

// The Python class of hooks: runs a call's receive phase, once, on the stream of its send phase.
class ReceiveHook {
 public:
  // `handle`: a dispatch's; None for a combine.
  ReceiveHook(nb::object streams, std::shared_ptr<LowLatencyPools> pools,
              std::shared_ptr<LowLatencyPool> pool, PooledExchange& used, Stream stream, nb::object handle)
      : streams_(std::move(streams)),
        pools_(std::move(pools)),
        pool_(std::move(pool)),
        used_(&used),
        stream_(stream),
        handle_(std::move(handle)) {
    used.busy = true;
  }

  // The exchange then serves other calls, even if the phase failed.
  void call() {
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

 private:
  void receive() {
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

  nb::object streams_;
  std::shared_ptr<LowLatencyPools> pools_;
  std::shared_ptr<LowLatencyPool> pool_;  // owns the exchange
  PooledExchange* used_;
  Stream stream_;
  nb::object handle_;
  bool pending_ = true;
};

// The low-latency calls of one Buffer.
class LowLatencyCalls {
 public:
  // `python`: the ferry.deep_ep._exchanges.Exchanges of the Buffer.
  LowLatencyCalls(nb::object streams, nb::object python)
      : streams_(std::move(streams)),
        python_(std::move(python)),
        pools_(std::make_shared<LowLatencyPools>(python_.attr("first_low_latency"))) {}

  nb::tuple dispatch(const LowLatencyDispatch& given);
  nb::tuple combine(const LowLatencyCombine& given);
  nb::object next_combine_buffer(const nb::object& handle);
  void close() { closed_ = true; }

 private:
  class OneCall;

  void require_open() const {
    if (closed_) throw UsageError("Buffer: used after destroy()");
  }
  PooledExchange& acquire(const std::shared_ptr<LowLatencyPool>& pool) {
    PooledExchange& exchange = pools_->acquire(*pool);
    last_ = pool;
    return exchange;
  }
  // Runs `read`, which finds the exchange of a call. If it throws, the error also ends the peers' call,
  // provided that this has the shape of the last call or is the first one.
  template <class Read>
  auto read_or_refuse(Operation operation, Read read) {
    try {
      return read();
    } catch (const std::exception&) {
      refuse(operation, exception_object(std::current_exception()));
    }
  }
  [[noreturn]] void refuse(Operation operation, const nb::object& error);
  CallStreams& streams() const { return nb::cast<CallStreams&>(streams_); }

  nb::object streams_, python_;
  std::shared_ptr<LowLatencyPools> pools_;
  std::shared_ptr<LowLatencyPool> last_;  // of the last call
  bool closed_ = false;
};

// A dispatch or combine, from the exchange that it uses to what it returns, besides its arrays.
class LowLatencyCalls::OneCall {
 public:
  OneCall(LowLatencyCalls& calls, std::shared_ptr<LowLatencyPool> pool, Framework framework)
      : calls_(calls),
        pool_(std::move(pool)),
        used_(calls.acquire(pool_)),
        lane_(*used_.exchange, 0),
        current_(stream_of(nb::none(), framework, lane_.device())) {
    lane_.set_stream(current_);
  }

  const PooledExchange& used() const { return used_; }
  Device device() const { return lane_.device(); }
  bool hooked() const { return hooked_; }  // the send phase alone is run now, and a hook runs the other

  // Runs `read`, which reads the arguments. If that fails, the peers' calls end with the same error.
  template <class Read>
  void read_or_refuse(Operation operation, const nb::object& async_finish, const nb::object& hooked,
                      Read read) {
    lane_.read_or_refuse({operation}, [&] {
      async_finish_ = is_true(async_finish);
      hooked_ = is_true(hooked);
      if (async_finish_ && hooked_) throw UsageError("async_finish and return_recv_hook exclude each other");
      read();
    });
  }

  // Runs `call` on the stream that CallStreams chooses.
  template <class Call>
  void run(CallOptions& options, Call call) {
    std::optional<PartTimer> timer(std::in_place, HostPart::streams);
    stream_ = calls_.streams().begin(lane_.device(), current_, nullptr, async_finish_);
    lane_.set_stream(stream_);
    options = lane_.options();
    timer.emplace(HostPart::exchange);
    calls_.pools_->run(*pool_, used_, [&] {
      const GilRelease unlocked;
      call(lane_.exchange());
    });
  }

  // The EventOverlap and the hook that the call returns. `used`: arrays that it reads and writes, of memory
  // of the current stream. `handle`: a dispatch's; None for a combine, which has a `result`.
  std::pair<nb::object, nb::object> end(std::vector<nb::object> used, const nb::object& handle,
                                        nb::object result = {}) {
    if (hooked_) {
      used_.exchange->pending(0) = {.owners = std::move(used), .result = std::move(result)};
      return {event_overlap(nb::none()),
              nb::cast(ReceiveHook(calls_.streams_, calls_.pools_, pool_, used_, stream_, handle))};
    }
    if (!async_finish_) return {event_overlap(nb::none()), nb::none()};
    const PartTimer timer(HostPart::streams);
    return {calls_.streams().end(lane_.device(), stream_, current_, std::move(used)), nb::none()};
  }

 private:
  LowLatencyCalls& calls_;
  std::shared_ptr<LowLatencyPool> pool_;
  PooledExchange& used_;
  LaneCall lane_;
  Stream current_, stream_{};
  bool async_finish_ = false, hooked_ = false;
};

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

// Throws UsageError for options that exclude each other.
Format format_of(const LowLatencyDispatch& given) {
  // Callers pass the options of fp8 with use_nvfp4 too, where they mean nothing.
  if (is_true(given.use_nvfp4)) {
    if (is_true(given.use_ue8m0_for_sf))
      throw UnsupportedError("low_latency_dispatch: use_ue8m0_for_sf: scales of NVFP4 are e4m3");
    return Format::nvfp4({.tiles = true});
  }
  const bool power_of_two = is_true(given.round_scale), packed = is_true(given.use_ue8m0);
  if (packed && !power_of_two)
    throw UsageError("use_ue8m0 needs round_scale: an exponent can only represent a power of two");
  if (!is_true(given.use_fp8)) return {};
  return {.kind = FormatKind::fp8_e4m3,
          .fp8 = {.column_major = true, .power_of_two = power_of_two, .packed = packed}};
}

// Reads the arguments of a dispatch, apart from those that choose the pool. `tokens`, `ids`: x and topk_idx.
void read_dispatch(const LowLatencyDispatch& given, const Array& tokens, const Array& ids,
                   const LowLatencyPool& pool, DispatchInput& in) {
  in.options.format = format_of(given);
  const Array& rows = in.arguments.rows(dense_array(given.x, tokens, in.arguments), "x", pool.shape.hidden,
                                        {kBf16, kFp16, kFp32});
  in.tokens = Tokens::rows(rows.data, rows.shape[0], *value_type_of(rows.element), 0);
  check_values(rows, *in.options.format, pool.shape.max_tokens);
  in.ids = ids_of(in.arguments.add(dense_array(given.topk_idx, ids, in.arguments), "topk_idx"), rows.shape[0],
                  pool.shape.top_k, "topk_idx");
  const nb::object& factor = given.x_global_scale;
  if (!encoding_of(*in.options.format).is_two_level() || factor.is_none()) return;
  if (pool.shape.on_device) {
    const Array& scale = in.arguments.dense(scale_on_device(given.x, factor), kFactor, kFp32, {1});
    in.options.global_scale = static_cast<const float*>(scale.data);
  } else {
    in.global_scale = scale_of_factor(factor, in);
    in.options.global_scale = &in.global_scale;
  }
}

// The counts that a dispatch adds to cumulative_local_expert_recv_stats; null without it.
std::int32_t* read_stats(const nb::object& stats, const LowLatencyPool& pool, Arguments& arguments) {
  if (stats.is_none()) return nullptr;
  constexpr const char* kName = "cumulative_local_expert_recv_stats";
  const Array& sums = arguments.dense(stats, kName, kInt32, {pool.local_experts});
  require_writable(sums, kName);
  return static_cast<std::int32_t*>(sums.data);
}

nb::tuple LowLatencyCalls::dispatch(const LowLatencyDispatch& given) {
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  require_open();
  Array tokens, ids;
  const auto pool = read_or_refuse(Operation::dispatch, [&] {
    tokens = inspect_matrix(given.x, "x");
    ids = inspect_matrix(given.topk_idx, "topk_idx");
    require_element(tokens, "x", {kBf16, kFp16, kFp32});
    require_element(ids, "topk_idx", {kInt32, kInt64});
    require_whole_rows(tokens, "x");
    require_slots(ids);
    return pools_->of(
        {.max_tokens = integer_from(1, given.max_tokens, "num_max_dispatch_tokens_per_rank", kMostTokens),
         .hidden = static_cast<int>(tokens.shape[1]),
         .experts = integer_from(1, given.experts, "num_experts", kMostExperts),
         .top_k = static_cast<int>(ids.shape[1]),
         .on_device = !is_host(tokens.device)});
  });
  OneCall call(*this, pool, tokens.framework);
  DispatchInput in(call.device(), Gradients::recorded);
  std::optional<Received> received;
  call.read_or_refuse(Operation::dispatch, given.async_finish, given.hooked, [&] {
    read_dispatch(given, tokens, ids, *pool, in);
    received.emplace(*pool, *in.options.format, NewArrays(tokens.framework, call.device()));
    received->memory.count_sums = read_stats(given.stats, *pool, in.arguments);
  });
  in.options.memory = received->memory;
  timer.reset();
  call.run(in.options.call, [&](Exchange& exchange) {
    dispatch_in_own_words([&] {
      if (call.hooked()) {
        exchange.dispatch_send(in.tokens, in.ids, nullptr, in.options);
      } else {
        exchange.dispatch(in.tokens, in.ids, nullptr, in.options);
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
  nb::object handle = nb::cast(LowLatencyHandle{.pool = pool,
                                                .exchange = call.used().owner,
                                                .plan = std::move(plan),
                                                .received = !call.hooked(),
                                                .ids = ids});
  std::vector<nb::object> arrays = received->all();
  for (nb::object& owner : in.arguments.owners()) arrays.push_back(std::move(owner));
  auto [event, hook] = call.end(std::move(arrays), handle);
  return nb::make_tuple(received->recv_x(), received->counts, std::move(handle), std::move(event),
                        std::move(hook));
}

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
  require_element(ids, "topk_idx", {kInt32, kInt64});
  if (ids.shape != weights.shape) {
    throw UsageError(
        str("topk_idx: expected shape ", shape_text(weights.shape), ", got ", shape_text(ids.shape)));
  }
  if (ids.framework != weights.framework)
    throw UsageError("topk_idx: expected an array of the framework of topk_weights");
  static CachedAttribute masked;
  return masked.get("ferry.deep_ep._layout", "masked_weights")(topk_idx, topk_weights);
}

void read_combine(const LowLatencyCombine& given, const nb::object& x, const LowLatencyHandle& handle,
                  const PyExchange& exchange, CombineInput& in) {
  const LowLatencyPool& pool = *handle.pool;
  handle.require_received();
  in.plan = &handle.plan;
  read_rows(x, pool, in);
  const Framework framework = in.arguments.framework();
  require_torch_or_numpy(framework, "x");
  in.arguments.keep_original(given.topk_idx);  // weights_of_slots() may copy them
  in.arguments.keep_original(given.topk_weights);
  const Array& weights = in.arguments.dense(weights_of_slots(given.topk_idx, given.topk_weights, handle.ids),
                                            "topk_weights", kFp32, {in.plan->tokens, pool.shape.top_k});
  in.options.topk_weights = static_cast<const float*>(weights.data);
  in.options.topk_weighted = true;
  const Shape shape = {in.plan->tokens, pool.shape.hidden};
  in.result_array =
      given.out.is_none() ? new_array(framework, kBf16, shape, exchange.state().device) : given.out;
  read_result(shape, "out", in);
}

nb::tuple LowLatencyCalls::combine(const LowLatencyCombine& given) {
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  require_open();
  const LowLatencyHandle& handle =
      *read_or_refuse(Operation::combine, [&] { return &handle_of(given.handle); });
  OneCall call(*this, handle.pool, handle.plan.framework);
  CombineInput in(call.device(), Gradients::recorded);
  call.read_or_refuse(Operation::combine, given.async_finish, given.hooked, [&] {
    const bool zero_copy = is_true(given.zero_copy);
    in.options.reduction = call.hooked() ? Reduction::exact : Reduction::partial;
    if (is_true(given.use_logfmt) && zero_copy)
      throw UsageError("low_latency_combine: use_logfmt and zero_copy exclude each other");
    if (zero_copy && handle.combine_buffer.is_none()) {
      throw UsageError(
          "low_latency_combine: zero_copy needs rows written to get_next_low_latency_combine_buffer(handle)");
    }
    read_combine(given, zero_copy ? handle.combine_buffer : given.x, handle, *call.used().exchange, in);
  });
  timer.reset();
  call.run(in.options.call, [&](Exchange& exchange) {
    combine_in_own_words([&] {
      if (call.hooked()) {
        exchange.combine_send(in.outputs, in.plan->plan, in.result, in.options);
      } else {
        exchange.combine(in.outputs, in.plan->plan, in.result, in.options);
      }
    });
  });
  timer.emplace(HostPart::results);
  std::vector<nb::object> arrays = in.arguments.owners();
  arrays.push_back(handle.plan.owner);
  auto [event, hook] = call.end(std::move(arrays), nb::none(), in.result_array);
  return nb::make_tuple(in.result_array, std::move(event), std::move(hook));
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
  static CachedAttribute functions[2];
  constexpr const char* kNames[] = {"src_info", "layout_range"};
  made = functions[index].get("ferry.deep_ep._layout", kNames[index])(self);
  return made;
}

}  // namespace

void bind_low_latency(nb::module_& module) {
  nb::class_<LowLatencyHandle>(
      module, "LowLatencyHandle",
      "(src_info, layout_range, M, H, E) of a low-latency dispatch; the first two are computed on first "
      "access.")
      .def("__len__", [](const LowLatencyHandle&) { return 5; })
      .def(
          "__getitem__",
          [](const nb::object& self, const nb::object& index) {
            return item_of(index, 5, [&](Py_ssize_t at) { return low_latency_element(self, at); });
          },
          "index"_a, nb::sig("def __getitem__(self, index: typing.Any) -> typing.Any"))
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
  nb::class_<LowLatencyCalls> calls(module, "_LowLatencyCalls",
                                    "For ferry.deep_ep: the low-latency calls of a Buffer.");
  calls.def(nb::init<nb::object, nb::object>())
      .def("next_combine_buffer", &LowLatencyCalls::next_combine_buffer, nb::arg().none())
      .def("close", &LowLatencyCalls::close);
  define_unread(calls, "dispatch", &LowLatencyCalls::dispatch);
  define_unread(calls, "combine", &LowLatencyCalls::combine);
}

}  // namespace ferry::python
