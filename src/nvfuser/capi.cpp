// The call shapes of nvFuser in C.
#include "ferry/nvfuser.hpp"

#include <cstdint>
#include <span>
#include <utility>

#include "capi/boundary.hpp"
#include "capi/convert.hpp"

struct ferry_nvfuser_exchange {
  ferry_nvfuser_exchange(const ferry::Rank& rank, const ferry::Config& config)
      : exchange(rank, config), ranks(rank.size()) {}

  ferry::nvfuser::Exchange exchange;
  const int ranks;
  ferry::nvfuser::DispatchResult received;  // of the last dispatch
};

namespace ferry::capi {
namespace {

void write_result(ferry_nvfuser_exchange& handle, nvfuser::DispatchResult last,
                  ferry_nvfuser_dispatch_result* result) {
  handle.received = std::move(last);
  const nvfuser::DispatchResult& received = handle.received;
  ferry_nvfuser_dispatch_result c{};
  c.recv_x = received.recv_x;
  c.recv_topk_idx = received.recv_topk_idx.data();
  c.recv_src_idx = received.recv_src_idx.data();
  c.recv_src_rank = received.recv_src_rank.data();
  c.n_tokens_to_rank = received.n_tokens_to_rank.data();
  c.n_tokens_from_rank = received.n_tokens_from_rank.data();
  c.rows = static_cast<std::int64_t>(received.recv_src_idx.size());
  write_sized(result, c, "ferry_nvfuser_dispatch_result");
}

// Empty without an array: the call then refuses its length on every rank.
std::span<const std::int64_t> values_of(const std::int64_t* first, std::int64_t count) {
  if (first == nullptr || count <= 0) return {};
  return {first, static_cast<std::size_t>(count)};
}

}  // namespace

extern "C" {

ferry_status ferry_nvfuser_exchange_create(const ferry_rank* rank, const ferry_config* config,
                                           ferry_nvfuser_exchange** exchange) {
  return guarded([&] {
    required(rank, "rank");
    required(exchange, "exchange");
    *exchange = new ferry_nvfuser_exchange(rank->rank, config_or_refuse(rank->rank, config));
  });
}

void ferry_nvfuser_exchange_destroy(ferry_nvfuser_exchange* exchange) {
  delete exchange;
}

int64_t ferry_nvfuser_capacity(const ferry_nvfuser_exchange* exchange) {
  return exchange == nullptr ? 0 : exchange->exchange.capacity();
}

ferry_status ferry_nvfuser_dispatch(ferry_nvfuser_exchange* handle,
                                    const ferry_nvfuser_dispatch_args* given) {
  return guarded([&] {
    nvfuser::Exchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_nvfuser_dispatch_args");
    Tokens tokens;
    Ids ids;
    try {
      // Zeroes the struct in case of an error, and refuses a wrong size before the call.
      write_sized(&required(args.result, "result"), ferry_nvfuser_dispatch_result{},
                  "ferry_nvfuser_dispatch_result");
      tokens = to_tokens(args.tokens);
      ids = to_ids(args.ids, args.id_type);
    } catch (const Error& error) {  // ends the peers' call too
      exchange.refuse_dispatch(error);
      throw;
    }
    try {
      write_result(*handle, exchange.dispatch(tokens, ids, {args.recv_x, {args.stream}}), args.result);
    } catch (const Error&) {  // such as ids out of range, of a dispatch that has delivered its rows
      nvfuser::DispatchResult last = exchange.last_dispatch_result();
      if (last.call != 0 && last.call != handle->received.call)
        write_result(*handle, std::move(last), args.result);
      throw;
    }
  });
}

ferry_status ferry_nvfuser_combine(ferry_nvfuser_exchange* handle, const ferry_nvfuser_combine_args* given) {
  return guarded([&] {
    nvfuser::Exchange& exchange = required(handle, "exchange").exchange;
    const auto args = read_sized(given, "ferry_nvfuser_combine_args");
    nvfuser::CombineInput input(args.rows, {});
    input.recv_src_idx = values_of(args.recv_src_idx, args.row_count);
    input.recv_src_rank = values_of(args.recv_src_rank, args.row_count);
    input.n_tokens_to_rank = values_of(args.n_tokens_to_rank, handle->ranks);
    input.n_tokens_from_rank = values_of(args.n_tokens_from_rank, handle->ranks);
    exchange.combine(input, args.tokens, args.result, {args.stream});
  });
}

}  // extern "C"

}  // namespace ferry::capi
