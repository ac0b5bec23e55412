#include <functional>
#include <span>
#include <utility>

#include "base/errors.hpp"
#include "base/text.hpp"
#include "capi/boundary.hpp"
#include "capi/convert.hpp"

namespace ferry::capi {
namespace {

static_assert(sizeof(ferry_step_metadata) == sizeof(StepMetadata));

// Arguments that cannot be converted end the peers' call too, like arguments that the exchange itself
// refuses.
template <class Convert>
auto convert_or_refuse(Exchange& exchange, Operation operation, const ferry_call_options& call,
                       const Convert& convert) {
  return or_refuse([&](const Error& error) { exchange.refuse(operation, error, known_call_options(call)); },
                   [&] { return convert(to_call_options(call)); });
}

// body(exchange, arguments), with the exchange of a handle and its caller's struct `name`.
template <class Args, class Body>
ferry_status call_with(ferry_exchange* handle, const Args* given, const char* name, const Body& body) {
  return guarded([&] {
    Exchange& exchange = required(handle, "exchange").exchange;
    body(exchange, read_sized(given, name));
  });
}

// The arguments of a dispatch, converted.
struct DispatchInput {
  Tokens tokens;
  Ids ids;
  Plan plan;
  const float* weights;
  DispatchOptions options;
};

DispatchInput to_input(Exchange& exchange, const ferry_dispatch_args& args) {
  return convert_or_refuse(
      exchange, Operation::dispatch, args.call, [&](const CallOptions& call) -> DispatchInput {
        if (args.ids != nullptr && args.plan.storage != nullptr) {
          throw UsageError("dispatch: ids and a plan exclude each other: pass one of them");
        }
        return {.tokens = to_tokens(args.tokens),
                .ids = to_ids(args.ids, args.id_type),
                .plan = to_plan(args.plan),
                .weights = args.weights,
                .options = {.call = call,
                            .format = to_format(args.format),
                            .memory = to_receive_buffers(args.memory),
                            .apply_weights = args.apply_weights != 0,
                            .weighted = args.weighted != 0,
                            .dot_rows = args.dot_rows,
                            .global_scale = args.global_scale,
                            .input_scales = to_input_scales(args.input_scales, args.input_scale_count),
                            .layer = static_cast<int>(std::clamp<std::int64_t>(args.layer, -1, INT32_MAX))}};
      });
}

DispatchInput to_input(Exchange& exchange, const ferry_combine_backward_args& args) {
  // Peers whose calls end after they have returned have also enqueued the return_values that follows.
  const auto refuse_return_too = [&](const Error& error) {
    if (has_kernels(exchange.config().backend))
      exchange.refuse(Operation::return_values, error, known_call_options(args.call));
  };
  const auto convert = [&](const CallOptions& call) -> DispatchInput {
    return {.tokens = to_tokens(args.d_result),
            .ids = {},
            .plan = to_plan(args.plan),
            .weights = args.topk_weights,
            .options = {
                .call = call, .format = to_format(args.format), .memory = to_receive_buffers(args.memory)}};
  };
  return or_refuse(refuse_return_too,
                   [&] { return convert_or_refuse(exchange, Operation::dispatch, args.call, convert); });
}

// Runs `dispatch` and writes its result, also when it ends with an error of check(): then the rows were
// received.
template <class Dispatch>
void write_result_of(const Exchange& exchange, int lane, ferry_dispatch_result* result,
                     const Dispatch& dispatch) {
  const auto write = [&](const DispatchResult& received) {
    if (result != nullptr) write_sized(result, to_c(received), "ferry_dispatch_result");
  };
  write({});  // zeroes the struct in case of another error, and refuses a wrong size before the call
  const bool exists = lane >= 0 && lane < exchange.config().lanes;
  const std::uint64_t before = exists ? exchange.last_dispatch_result(lane).call : 0;
  try {
    write(dispatch());
  } catch (const Error&) {
    if (!exists) throw;
    const DispatchResult& last = exchange.last_dispatch_result(lane);
    if (last.call != 0 && last.call != before) write(last);
    throw;
  }
}

// The arguments of a combine, converted.
struct CombineInput {
  Outputs outputs;
  Plan plan;
  Result result;
  CombineOptions options;
};

CombineInput to_input(Exchange& exchange, const ferry_combine_args& args) {
  return convert_or_refuse(exchange, Operation::combine, args.call,
                           [&](const CallOptions& call) -> CombineInput {
                             return {.outputs = to_outputs(args.outputs),
                                     .plan = to_plan(args.plan),
                                     .result = to_result(args.result),
                                     .options = {.call = call,
                                                 .row_weights = args.row_weights,
                                                 .topk_weights = args.topk_weights,
                                                 .topk_weighted = args.topk_weighted != 0,
                                                 .reduction = to_reduction(args.reduction),
                                                 .row_values = args.row_values,
                                                 .route_values = args.route_values,
                                                 .shared_outputs = args.shared_outputs,
                                                 .epilogue = to_epilogue(args.epilogue)}};
                           });
}

// Of a call that sends values by a plan.
template <class Args>
std::pair<CallOptions, Plan> to_input(Exchange& exchange, Operation operation, const Args& args) {
  return convert_or_refuse(exchange, operation, args.call,
                           [&](const CallOptions& call) { return std::pair(call, to_plan(args.plan)); });
}

}  // namespace

extern "C" {

ferry_status ferry_dispatch(ferry_exchange* handle, const ferry_dispatch_args* given) {
  return call_with(handle, given, "ferry_dispatch_args", [](Exchange& exchange, const auto& args) {
    write_result_of(exchange, args.call.lane, args.result, [&] {
      const DispatchInput in = to_input(exchange, args);
      return in.plan.empty() ? exchange.dispatch(in.tokens, in.ids, in.weights, in.options)
                             : exchange.dispatch(in.tokens, in.plan, in.weights, in.options);
    });
  });
}

ferry_status ferry_dispatch_send(ferry_exchange* handle, const ferry_dispatch_args* given) {
  return call_with(handle, given, "ferry_dispatch_args", [](Exchange& exchange, const auto& args) {
    const DispatchInput in = to_input(exchange, args);
    if (in.plan.empty()) return exchange.dispatch_send(in.tokens, in.ids, in.weights, in.options);
    exchange.dispatch_send(in.tokens, in.plan, in.weights, in.options);
  });
}

ferry_status ferry_dispatch_receive(ferry_exchange* handle, const ferry_call_options* given,
                                    ferry_dispatch_result* result) {
  return guarded([&] {
    Exchange& exchange = required(handle, "exchange").exchange;
    const CallOptions call = to_call_options(given);
    write_result_of(exchange, call.lane, result, [&] { return exchange.dispatch_receive(call); });
  });
}

ferry_status ferry_combine(ferry_exchange* handle, const ferry_combine_args* given) {
  return call_with(handle, given, "ferry_combine_args", [](Exchange& exchange, const auto& args) {
    const CombineInput in = to_input(exchange, args);
    exchange.combine(in.outputs, in.plan, in.result, in.options);
  });
}

ferry_status ferry_combine_send(ferry_exchange* handle, const ferry_combine_args* given) {
  return call_with(handle, given, "ferry_combine_args", [](Exchange& exchange, const auto& args) {
    const CombineInput in = to_input(exchange, args);
    exchange.combine_send(in.outputs, in.plan, in.result, in.options);
  });
}

ferry_status ferry_combine_receive(ferry_exchange* handle, const ferry_call_options* call) {
  return guarded([&] { required(handle, "exchange").exchange.combine_receive(to_call_options(call)); });
}

ferry_status ferry_combine_backward(ferry_exchange* handle, const ferry_combine_backward_args* given) {
  return call_with(handle, given, "ferry_combine_backward_args", [](Exchange& exchange, const auto& args) {
    write_result_of(exchange, args.call.lane, args.result, [&] {
      const DispatchInput in = to_input(exchange, args);
      const Outputs outputs{
          .data = args.outputs, .type = exchange.config().combine_type, .rows = args.output_rows};
      return exchange.combine_backward(in.tokens, in.plan, in.weights, outputs, args.d_weights, in.options);
    });
  });
}

ferry_status ferry_route_values(ferry_exchange* handle, const ferry_route_values_args* given) {
  return call_with(handle, given, "ferry_route_values_args", [](Exchange& exchange, const auto& args) {
    const auto [call, plan] = to_input(exchange, Operation::route_values, args);
    exchange.route_values(args.values, plan, args.row_values, call);
  });
}

ferry_status ferry_return_values(ferry_exchange* handle, const ferry_return_values_args* given) {
  return call_with(handle, given, "ferry_return_values_args", [](Exchange& exchange, const auto& args) {
    const auto [call, plan] = to_input(exchange, Operation::return_values, args);
    exchange.return_values(args.row_values, plan, args.route_values, call);
  });
}

ferry_status ferry_metadata(ferry_exchange* handle, const ferry_metadata_args* given) {
  return call_with(handle, given, "ferry_metadata_args", [](Exchange& exchange, const auto& args) {
    const CallOptions call =
        convert_or_refuse(exchange, Operation::metadata, args.call, [&](const CallOptions& options) {
          required(args.metadata, "metadata");
          return options;
        });
    const Count count = args.device_count != nullptr ? Count(args.device_count) : Count(args.count);
    const StepMetadata* computed = exchange.metadata(count, call, reinterpret_cast<StepMetadata*>(args.into));
    *args.metadata = reinterpret_cast<const ferry_step_metadata*>(computed);
  });
}

ferry_status ferry_all_gather_v(ferry_exchange* handle, const ferry_all_gather_v_args* given) {
  return call_with(handle, given, "ferry_all_gather_v_args", [](Exchange& exchange, const auto& args) {
    const CallOptions call = convert_or_refuse(exchange, Operation::all_gather_v, args.call, std::identity());
    exchange.all_gather_v({.rows = args.rows,
                           .count = args.count,
                           .row_bytes = args.row_bytes,
                           .gathered = args.gathered,
                           .capacity = args.capacity,
                           .device_count = args.device_count},
                          call);
  });
}

ferry_status ferry_reduce_scatter_v(ferry_exchange* handle, const ferry_reduce_scatter_v_args* given) {
  return call_with(handle, given, "ferry_reduce_scatter_v_args", [](Exchange& exchange, const auto& args) {
    const auto [call, type] = convert_or_refuse(
        exchange, Operation::reduce_scatter_v, args.call,
        [&](const CallOptions& options) { return std::pair(options, to_dtype(args.type, "type")); });
    exchange.reduce_scatter_v({.rows = args.rows,
                               .total = args.total,
                               .type = type,
                               .sums = args.sums,
                               .count = args.count,
                               .device_count = args.device_count},
                              call);
  });
}

ferry_status ferry_dispatch_counts(ferry_exchange* handle, const ferry_dispatch_counts_args* given) {
  return call_with(handle, given, "ferry_dispatch_counts_args", [](Exchange& exchange, const auto& args) {
    const auto [call, ids] =
        convert_or_refuse(exchange, Operation::dispatch_counts, args.call, [&](const CallOptions& options) {
          checked_size(args.result, "ferry_dispatch_counts_result");
          return std::pair(options, to_ids(args.ids, args.id_type));
        });
    const DispatchCounts counts = exchange.dispatch_counts(ids, args.tokens, call);
    ferry_dispatch_counts_result c{};
    c.total = counts.total;
    c.routes = counts.routes.data();
    c.tokens = counts.tokens.data();
    c.local_experts = static_cast<std::int64_t>(counts.routes.size());
    c.ranks = static_cast<std::int64_t>(counts.tokens.size());
    write_sized(args.result, c, "ferry_dispatch_counts_result");
  });
}

ferry_status ferry_refuse(ferry_exchange* handle, int operation, const char* reason,
                          const ferry_call_options* call) {
  return guarded([&] {
    Exchange& exchange = required(handle, "exchange").exchange;
    const auto refused = to_enum(operation, Operation::return_values, "operation");
    exchange.refuse(refused, UsageError(&required(reason, "reason")), to_call_options(call));
  });
}

}  // extern "C"

}  // namespace ferry::capi
