// The call shapes of MAX on device memory in C.
#include "ferry/max_device.hpp"

#include <cstdint>
#include <utility>

#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "capi/handles.hpp"
#include "max/capi_arguments.hpp"

struct ferry_max_device_exchange {
  ferry_max_device_exchange(const ferry::Rank& rank, const ferry::Config& config) : exchange(rank, config) {}

  ferry::max::DeviceExchange exchange;
};

namespace ferry::capi {
namespace {

// Arguments that cannot be converted end the peers' call too.
template <class Convert>
auto convert_or_refuse(max::DeviceExchange& exchange, Operation operation, int lane, void* stream,
                       const Convert& convert) {
  try {
    return in_words(max::kWords, convert);
  } catch (const Error& error) {
    exchange.refuse(operation, lane, error, {stream});
    throw;
  }
}

void write_result(const max::DeviceExchange& exchange, const max::DeviceDispatchResult& received,
                  ferry_max_device_dispatch_result* result) {
  if (result == nullptr) return;
  ferry_max_device_dispatch_result c{};
  c.output_tokens = received.output_tokens;
  copy_parts(received.parts, c.parts);
  c.tile_offsets = received.tile_offsets;
  c.row_offsets = received.row_offsets;
  c.expert_ids = received.expert_ids;
  c.expert_usage_stats = received.expert_usage_stats;
  c.src_info = received.src_info;
  c.counts = received.counts;
  c.capacity = received.capacity;
  c.groups = received.groups;
  c.ranks = exchange.rank().size();
  write_sized(result, c, "ferry_max_device_dispatch_result");
}

// Zeroes the struct in case of an error, and refuses a wrong size before the call.
void clear_result(ferry_max_device_dispatch_result* result) {
  if (result == nullptr) return;
  write_sized(result, ferry_max_device_dispatch_result{}, "ferry_max_device_dispatch_result");
}

MaxDispatchArguments to_input(max::DeviceExchange& exchange, const ferry_max_device_dispatch_args& args) {
  return convert_or_refuse(exchange, Operation::dispatch, args.lane, args.stream, [&] {
    MaxDispatchArguments in = max_dispatch_of(args);
    in.tokens.device_count = args.device_count;
    return in;
  });
}

// The arguments of a combine, converted.
struct DeviceCombineArguments {
  max::DeviceCombineInput input;
  max::CombineOutput output;
};

DeviceCombineArguments to_input(max::DeviceExchange& exchange, const ferry_max_device_combine_args& args) {
  return convert_or_refuse(exchange, Operation::combine, args.lane, args.stream, [&] {
    DeviceCombineArguments in;
    in.input.input_tokens = to_outputs(args.input_tokens);
    in.input.src_info = args.src_info;
    in.input.row_offsets = args.row_offsets;
    in.input.counts = args.counts;
    read_own_ids(args, &in.input);
    in.output = max_output_of(args);
    return in;
  });
}

}  // namespace

extern "C" {

ferry_status ferry_max_device_exchange_create(const ferry_rank* rank, const ferry_config* config,
                                              ferry_max_device_exchange** exchange) {
  return guarded([&] {
    required(rank, "rank");
    required(exchange, "exchange");
    *exchange = new ferry_max_device_exchange(rank->rank, config_or_refuse(rank->rank, config));
  });
}

void ferry_max_device_exchange_destroy(ferry_max_device_exchange* exchange) {
  delete exchange;
}

ferry_status ferry_max_device_ep_dispatch_async(ferry_max_device_exchange* handle,
                                                const ferry_max_device_dispatch_args* given) {
  return guarded([&] {
    max::DeviceExchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_device_dispatch_args");
    const auto [tokens, ids, format] = to_input(exchange, args);
    exchange.ep_dispatch_async(tokens, ids, args.lane, {args.stream}, format);
  });
}

ferry_status ferry_max_device_ep_dispatch_wait(ferry_max_device_exchange* handle,
                                               const ferry_max_device_dispatch_wait_args* given) {
  return guarded([&] {
    max::DeviceExchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_device_dispatch_wait_args");
    clear_result(args.result);
    write_result(exchange, exchange.ep_dispatch_wait(args.lane, {args.stream}), args.result);
  });
}

ferry_status ferry_max_device_ep_fused_dispatch(ferry_max_device_exchange* handle,
                                                const ferry_max_device_dispatch_args* given) {
  return guarded([&] {
    max::DeviceExchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_device_dispatch_args");
    clear_result(args.result);
    const auto [tokens, ids, format] = to_input(exchange, args);
    write_result(exchange, exchange.ep_fused_dispatch(tokens, ids, args.lane, {args.stream}, format),
                 args.result);
  });
}

ferry_status ferry_max_device_ep_combine_async(ferry_max_device_exchange* handle,
                                               const ferry_max_device_combine_args* given) {
  return guarded([&] {
    max::DeviceExchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_device_combine_args");
    const DeviceCombineArguments in = to_input(exchange, args);
    exchange.ep_combine_async(in.input, in.output, args.lane, {args.stream});
  });
}

ferry_status ferry_max_device_ep_combine_wait(ferry_max_device_exchange* handle,
                                              const ferry_max_device_combine_wait_args* given) {
  return guarded([&] {
    max::DeviceExchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_device_combine_wait_args");
    exchange.ep_combine_wait(args.lane, {args.stream});
  });
}

ferry_status ferry_max_device_ep_fused_combine(ferry_max_device_exchange* handle,
                                               const ferry_max_device_combine_args* given) {
  return guarded([&] {
    max::DeviceExchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_device_combine_args");
    const DeviceCombineArguments in = to_input(exchange, args);
    exchange.ep_fused_combine(in.input, in.output, args.lane, {args.stream});
  });
}

ferry_status ferry_max_device_synchronize(ferry_max_device_exchange* exchange, int lane, void* stream) {
  return guarded([&] { required(exchange, "exchange").exchange.synchronize(lane, {stream}); });
}

ferry_status ferry_max_device_check(ferry_max_device_exchange* exchange, int lane) {
  return guarded([&] { required(exchange, "exchange").exchange.check(lane); });
}

}  // extern "C"

}  // namespace ferry::capi
