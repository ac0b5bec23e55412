// The call shapes of MAX in C.
#include "ferry/max.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "capi/handles.hpp"
#include "max/capi_arguments.hpp"

struct ferry_max_exchange {
  ferry_max_exchange(const ferry::Rank& rank, const ferry::Config& config)
      : exchange(rank, config), results(static_cast<std::size_t>(exchange.config().lanes)) {}

  int groups() const {
    const ferry::Config& config = exchange.config();
    return config.shared_experts + config.placement.local_experts(exchange.rank().index());
  }

  ferry::max::Exchange exchange;
  std::vector<ferry::max::DispatchResult> results;  // of each lane's last dispatch
};

namespace ferry::capi {
namespace {

// Arguments that cannot be converted end the peers' call too.
template <class Convert>
auto convert_or_refuse(max::Exchange& exchange, Operation operation, int lane, const Convert& convert) {
  try {
    return in_words(max::kWords, convert);
  } catch (const Error& error) {
    exchange.refuse(operation, lane, error);
    throw;
  }
}

void write_result(ferry_max_exchange& handle, int lane, max::DispatchResult received,
                  ferry_max_dispatch_result* result) {
  max::DispatchResult& kept = handle.results[static_cast<std::size_t>(lane)];
  kept = std::move(received);
  if (result == nullptr) return;
  ferry_max_dispatch_result c{};
  c.output_tokens = kept.output_tokens;
  copy_parts(kept.parts, c.parts);
  c.tile_offsets = kept.tile_offsets;
  c.row_offsets = kept.row_offsets.data();
  c.expert_ids = kept.expert_ids.data();
  c.src_info = kept.src_info.data();
  c.counts = kept.counts.data();
  std::ranges::copy(kept.expert_usage_stats, c.expert_usage_stats);
  c.groups = handle.groups();
  c.ranks = handle.exchange.rank().size();
  write_sized(result, c, "ferry_max_dispatch_result");
}

// Runs `dispatch` and writes its result, also when it ends with a finding such as ids out of range: then the
// rows were received.
template <class Dispatch>
void write_result_of(ferry_max_exchange& handle, int lane, ferry_max_dispatch_result* result,
                     const Dispatch& dispatch) {
  // Zeroes the struct in case of another error, and refuses a wrong size before the call.
  if (result != nullptr) write_sized(result, ferry_max_dispatch_result{}, "ferry_max_dispatch_result");
  try {
    write_result(handle, lane, dispatch(), result);
  } catch (const Error&) {
    if (lane < 0 || lane >= handle.exchange.config().lanes) throw;
    max::DispatchResult last = handle.exchange.last_dispatch_result(lane);
    const std::uint64_t before = handle.results[static_cast<std::size_t>(lane)].call;
    if (last.call != 0 && last.call != before) write_result(handle, lane, std::move(last), result);
    throw;
  }
}

MaxDispatchArguments to_input(max::Exchange& exchange, const ferry_max_dispatch_args& args) {
  return convert_or_refuse(exchange, Operation::dispatch, args.lane, [&] { return max_dispatch_of(args); });
}

// The arguments of a combine, converted.
struct CombineArguments {
  max::CombineInput input;
  max::CombineOutput output;
};

CombineArguments to_input(ferry_max_exchange& handle, const ferry_max_combine_args& args) {
  return convert_or_refuse(handle.exchange, Operation::combine, args.lane, [&] {
    CombineArguments in;
    in.input.input_tokens = to_outputs(args.input_tokens);
    if (args.number < 0 || args.number > handle.groups())
      throw UsageError(str("number = ", args.number, ", must be 0 to ", handle.groups()));
    in.input.row_offsets = {&required(args.row_offsets, "row_offsets"),
                            static_cast<std::size_t>(args.number) + 1};
    const std::size_t rows = in.input.row_offsets.back();
    if (rows > 0) in.input.src_info = {&required(args.src_info, "src_info"), 2 * rows};
    const auto groups = static_cast<std::size_t>(handle.groups());
    if (groups > 0) {
      in.input.counts = {&required(args.counts, "counts"),
                         groups * static_cast<std::size_t>(handle.exchange.rank().size())};
    }
    read_own_ids(args, &in.input);
    in.output = max_output_of(args);
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
    const auto [tokens, ids, format] = to_input(exchange, args);
    exchange.ep_dispatch_async(tokens, ids, args.lane, format);
  });
}

ferry_status ferry_max_ep_dispatch_wait(ferry_max_exchange* handle,
                                        const ferry_max_dispatch_wait_args* given) {
  return guarded([&] {
    max::Exchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_dispatch_wait_args");
    write_result_of(*handle, args.lane, args.result, [&] { return exchange.ep_dispatch_wait(args.lane); });
  });
}

ferry_status ferry_max_ep_fused_dispatch(ferry_max_exchange* handle, const ferry_max_dispatch_args* given) {
  return guarded([&] {
    max::Exchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_dispatch_args");
    write_result_of(*handle, args.lane, args.result, [&] {
      const auto [tokens, ids, format] = to_input(exchange, args);
      return exchange.ep_fused_dispatch(tokens, ids, args.lane, format);
    });
  });
}

ferry_status ferry_max_ep_combine_async(ferry_max_exchange* handle, const ferry_max_combine_args* given) {
  return guarded([&] {
    max::Exchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_combine_args");
    const CombineArguments in = to_input(*handle, args);
    exchange.ep_combine_async(in.input, in.output, args.lane);
  });
}

ferry_status ferry_max_ep_combine_wait(ferry_max_exchange* exchange, int lane) {
  return guarded([&] { required(exchange, "exchange").exchange.ep_combine_wait(lane); });
}

ferry_status ferry_max_ep_fused_combine(ferry_max_exchange* handle, const ferry_max_combine_args* given) {
  return guarded([&] {
    max::Exchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_max_combine_args");
    const CombineArguments in = to_input(*handle, args);
    exchange.ep_fused_combine(in.input, in.output, args.lane);
  });
}

}  // extern "C"

}  // namespace ferry::capi
