// The call shapes of MAX in C.
#include "ferry/max.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "exchange/configuration.hpp"
#include "max/words.hpp"

struct ferry_max_exchange {
  ferry_max_exchange(const ferry::Rank& rank, const ferry::Config& config)
      : exchange(rank, config), calls(static_cast<std::size_t>(exchange.config().lanes)) {}

  int groups() const {
    const ferry::Config& config = exchange.config();
    return config.shared_experts + config.placement.local_experts(exchange.rank().index());
  }

  bool on_device() const { return ferry::chosen_memory(exchange.config()) == ferry::MemoryKind::device; }

  ferry::max::Exchange exchange;
  std::vector<std::uint64_t> calls;  // of each lane's last dispatch whose result was asked for
};

namespace ferry::capi {
namespace {

// Arguments that cannot be converted end the peers' call too.
template <class Convert>
auto convert_or_refuse(max::Exchange& exchange, Operation operation, const ferry_call_options& call,
                       const Convert& convert) {
  try {
    return in_words(max::kWords, [&] { return convert(to_call_options(call)); });
  } catch (const Error& error) {
    exchange.refuse(operation, error, known_call_options(call));
    throw;
  }
}

void write_result(ferry_max_exchange& handle, int lane, const max::DispatchResult& received,
                  ferry_max_dispatch_result* result) {
  handle.calls[static_cast<std::size_t>(lane)] = received.call;
  if (result == nullptr) return;
  ferry_max_dispatch_result c{};
  c.output_tokens = received.output_tokens;
  copy_parts(received.parts, c.parts);
  c.tile_offsets = received.tile_offsets;
  c.row_offsets = received.row_offsets.data();
  c.expert_ids = received.expert_ids.data();
  c.expert_usage_stats = received.expert_usage_stats;
  c.src_info = received.src_info.data();
  c.counts = received.counts.data();
  c.capacity = received.capacity;
  c.groups = received.groups;
  c.ranks = handle.exchange.rank().size();
  write_sized(result, c, "ferry_max_dispatch_result");
}

// Runs `dispatch` and writes its result, in host memory also when it ends with a finding such as ids out of
// range: then the rows were received.
template <class Dispatch>
void write_result_of(ferry_max_exchange& handle, int lane, ferry_max_dispatch_result* result,
                     const Dispatch& dispatch) {
  // Zeroes the struct in case of another error, and refuses a wrong size before the call.
  if (result != nullptr) write_sized(result, ferry_max_dispatch_result{}, "ferry_max_dispatch_result");
  try {
    write_result(handle, lane, dispatch(), result);
  } catch (const Error&) {
    if (handle.on_device() || lane < 0 || lane >= handle.exchange.config().lanes) throw;
    const max::DispatchResult last = handle.exchange.last_dispatch_result({.lane = lane});
    const std::uint64_t before = handle.calls[static_cast<std::size_t>(lane)];
    if (last.call != 0 && last.call != before) write_result(handle, lane, last, result);
    throw;
  }
}

struct DispatchArguments {
  Tokens tokens;
  Ids ids;
  max::DispatchOptions options;
};

DispatchArguments to_input(max::Exchange& exchange, const ferry_max_dispatch_args& args) {
  return convert_or_refuse(exchange, Operation::dispatch, args.call, [&](const CallOptions& call) {
    return DispatchArguments{
        .tokens = to_tokens(args.input_tokens),
        .ids = to_ids(args.topk_ids, args.id_type),
        .options = {.call = call,
                    .format = to_format(args.format),
                    .global_scale = args.global_scale,
                    .input_scales = to_input_scales(args.input_scales, args.input_scale_count)}};
  });
}

struct CombineArguments {
  CallOptions call;
  max::CombineInput input;
  max::CombineOutput output;
};

// In device memory the host knows no number of rows, and the call checks the pointers.
void read_arrays(const ferry_max_exchange& handle, const ferry_max_combine_args& args,
                 max::CombineInput& in) {
  const bool on_device = handle.on_device();
  const auto groups = static_cast<std::size_t>(handle.groups());
  if (!on_device && (args.number < 0 || args.number > handle.groups()))
    throw UsageError(str("number = ", args.number, ", must be 0 to ", handle.groups()));
  if (!on_device) required(args.row_offsets, "row_offsets");
  in.row_offsets = {args.row_offsets, (on_device ? groups : static_cast<std::size_t>(args.number)) + 1};
  const std::size_t rows = on_device ? 0 : in.row_offsets.back();
  if (rows > 0) required(args.src_info, "src_info");
  in.src_info = {args.src_info, 2 * rows};
  if (!on_device && groups > 0) required(args.counts, "counts");
  in.counts = {args.counts, groups * static_cast<std::size_t>(handle.exchange.rank().size())};
}

CombineArguments to_input(ferry_max_exchange& handle, const ferry_max_combine_args& args) {
  return convert_or_refuse(handle.exchange, Operation::combine, args.call, [&](const CallOptions& call) {
    CombineArguments in;
    in.call = call;
    in.input.input_tokens = to_outputs(args.input_tokens);
    read_arrays(handle, args, in.input);
    if (args.own_ids != 0) {  // in place of those of the last dispatch
      in.input.topk_ids = to_ids(args.topk_ids, args.id_type);
      in.input.tokens = args.tokens;
      if (args.tokens < 0) throw UsageError(str("tokens = ", args.tokens, ", must be 0 or more"));
    }
    in.output = {.output_tokens = to_result(args.output_tokens),
                 .router_weights = args.router_weights,
                 .shared_outputs = args.shared_outputs,
                 .epilogue = to_epilogue(args.epilogue)};
    return in;
  });
}

}  // namespace

extern "C" {

ferry_status ferry_max_group_index(const int32_t* counts, int groups, int alignment, uint32_t* row_offsets,
                                   int32_t* expert_ids, int* number) {
  return guarded([&] {
    if (groups < 0) throw UsageError(str("groups = ", groups, ", must be 0 or more"));
    if (groups > 0) required(counts, "counts");
    const max::GroupIndex index = max::group_index({counts, static_cast<std::size_t>(groups)}, alignment);
    std::ranges::copy(index.row_offsets, &required(row_offsets, "row_offsets"));
    if (index.number() > 0) std::ranges::copy(index.expert_ids, &required(expert_ids, "expert_ids"));
    required(number, "number") = index.number();
  });
}

ferry_status ferry_max_skip_a2a(ferry_config* config, int allreduce_world_size) {
  return guarded([&] {
    ferry_config& set = required(config, "config");
    const Config skips = max::skip_a2a({.shared_experts = set.shared_experts}, allreduce_world_size);
    set.input = static_cast<std::int32_t>(skips.input);
    set.shared_split = skips.shared_split;
  });
}

ferry_status ferry_max_exchange_create(const ferry_rank* rank, const ferry_config* config,
                                       ferry_max_exchange** exchange) {
  return guarded([&] {
    required(rank, "rank");
    required(exchange, "exchange");
    *exchange = new ferry_max_exchange(rank->rank, config_or_refuse(rank->rank, config));
  });
}

void ferry_max_exchange_destroy(ferry_max_exchange* exchange) {
  delete exchange;
}

ferry_status ferry_max_ep_dispatch_async(ferry_max_exchange* handle, const ferry_max_dispatch_args* given) {
  return guarded([&] {
    max::Exchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_dispatch_args");
    const auto [tokens, ids, options] = to_input(exchange, args);
    exchange.ep_dispatch_async(tokens, ids, options);
  });
}

ferry_status ferry_max_ep_dispatch_wait(ferry_max_exchange* handle, const ferry_call_options* given,
                                        ferry_max_dispatch_result* result) {
  return guarded([&] {
    max::Exchange& exchange = required(handle, "exchange").exchange;
    const CallOptions call = to_call_options(given);
    write_result_of(*handle, call.lane, result, [&] { return exchange.ep_dispatch_wait(call); });
  });
}

ferry_status ferry_max_ep_fused_dispatch(ferry_max_exchange* handle, const ferry_max_dispatch_args* given) {
  return guarded([&] {
    max::Exchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_dispatch_args");
    write_result_of(*handle, args.call.lane, args.result, [&] {
      const auto [tokens, ids, options] = to_input(exchange, args);
      return exchange.ep_fused_dispatch(tokens, ids, options);
    });
  });
}

ferry_status ferry_max_ep_combine_async(ferry_max_exchange* handle, const ferry_max_combine_args* given) {
  return guarded([&] {
    max::Exchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_combine_args");
    const CombineArguments in = to_input(*handle, args);
    exchange.ep_combine_async(in.input, in.output, in.call);
  });
}

ferry_status ferry_max_ep_combine_wait(ferry_max_exchange* exchange, const ferry_call_options* call) {
  return guarded([&] { required(exchange, "exchange").exchange.ep_combine_wait(to_call_options(call)); });
}

ferry_status ferry_max_ep_fused_combine(ferry_max_exchange* handle, const ferry_max_combine_args* given) {
  return guarded([&] {
    max::Exchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_combine_args");
    const CombineArguments in = to_input(*handle, args);
    exchange.ep_fused_combine(in.input, in.output, in.call);
  });
}

ferry_status ferry_max_synchronize(ferry_max_exchange* exchange, const ferry_call_options* call) {
  return guarded([&] { required(exchange, "exchange").exchange.synchronize(to_call_options(call)); });
}

ferry_status ferry_max_check(ferry_max_exchange* exchange, int lane) {
  return guarded([&] { required(exchange, "exchange").exchange.check(lane); });
}

}  // extern "C"

}  // namespace ferry::capi
