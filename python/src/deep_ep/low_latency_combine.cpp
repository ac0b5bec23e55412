#include "base/errors.hpp"
#include "base/text.hpp"
#include "cast.hpp"
#include "combine.hpp"
#include "deep_ep/arguments.hpp"
#include "deep_ep/low_latency.hpp"
#include "dispatch.hpp"
#include "ferry/error.hpp"
#include "host_parts.hpp"
#include "interpreter.hpp"

namespace ferry::python {

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
  return masked.get("ferry.deep_ep._low_latency", "masked_weights")(topk_idx, topk_weights);
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
  timer.emplace(HostPart::exchange);
  pools_->run(*handle.pool, used, [&] {
    const GilRelease unlocked;
    combine_in_own_words([&] {
      if (hooked) {
        call.exchange().combine_send(in.outputs, in.plan->plan, in.result, in.options, stream);
      } else {
        call.exchange().combine(in.outputs, in.plan->plan, in.result, in.options, stream);
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

}  // namespace ferry::python
