// Dispatch and combine in the call shapes of nvFuser: combine needs no plan and no ids.
//
//   nvfuser::Exchange exchange(rank, config);
//   nvfuser::DispatchResult received = exchange.dispatch(tokens, ids);
//   ... run the experts on received.recv_x ...
//   exchange.combine(nvfuser::CombineInput(rows, received), tokens.count, result);
//
// docs/guides/nvfuser.md explains the arrays. Shapes use the symbols of ferry/types.hpp.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/group.hpp"

namespace ferry::nvfuser {

/// Options of a dispatch.
struct DispatchOptions {
  void* recv_x =
      nullptr;      ///< [capacity(), H], aligned to 16 bytes: takes the rows; null: the exchange's memory
  Stream stream{};  ///< device memory: the work waits for what is on it
};

/// What a rank has received. With K = 1 rows are sorted by local expert, source rank, token. With K > 1 there
/// is one row for each (token, rank), sorted by source rank, token.
struct DispatchResult {
  /// [rows, H], dense: DispatchOptions::recv_x, or memory of the exchange until its next dispatch.
  const void* recv_x = nullptr;
  std::vector<std::int64_t> recv_topk_idx;  ///< K = 1: [rows] global expert ids; else [rows, K] local or -1
  std::vector<std::int64_t> recv_src_idx;   ///< [rows] index of the row's token on its source rank
  std::vector<std::int64_t> recv_src_rank;  ///< [rows]
  std::vector<std::int64_t> n_tokens_to_rank;    ///< [R] rows that this rank has sent to each rank
  std::vector<std::int64_t> n_tokens_from_rank;  ///< [R] rows that this rank has received from each rank
  std::uint64_t call = 0;                        ///< call number of the dispatch; 0: it has delivered nothing
};

/// What combine takes: the experts' outputs in the order of recv_x, with K > 1 the sum over this rank's
/// experts, and four arrays of the DispatchResult.
struct CombineInput {
  CombineInput(const void* outputs, const DispatchResult& received)
      : rows(outputs),
        recv_src_idx(received.recv_src_idx),
        recv_src_rank(received.recv_src_rank),
        n_tokens_to_rank(received.n_tokens_to_rank),
        n_tokens_from_rank(received.n_tokens_from_rank) {}

  const void*
      rows;  ///< [rows, H] of the exchange's type, dense, aligned to 16 bytes; may be null without rows
  std::span<const std::int64_t> recv_src_idx, recv_src_rank, n_tokens_to_rank, n_tokens_from_rank;
};

/// Dispatch and combine for one configuration. In device memory x, ids, rows and results are addresses there;
/// the arrays of integers are the host's.
///
/// Collective: every rank constructs it and makes the same calls in the same order, one at a time. Blocking:
/// calls return when this rank's result is complete, in device memory too, so they cannot be captured.
/// @throws UsageError  an argument of one rank is wrong: on every rank; the exchange stays usable
/// @throws TimeoutError, PeerLostError  final for the group
class Exchange {
 public:
  /// Uses experts, top_k, hidden, max_tokens, backend, engine, memory, hops, window, placement, deadline and
  /// format of `config`. The format is the type of tokens, rows and results. nvFuser's calls decide all else.
  /// @throws UnsupportedError  experts in slices
  /// @throws UsageError  a format other than bf16, fp16 and fp32, another setting that is not its default, or
  /// as ferry::Exchange
  Exchange(const Rank& rank, const Config& config);
  ~Exchange();

  /// Sends every token to the ranks of its experts, `ids` [N, K]; -1 masks a slot.
  DispatchResult dispatch(const Tokens& tokens, const Ids& ids, const DispatchOptions& options = {});

  std::int64_t capacity() const;  ///< the most rows that a dispatch gives this rank

  /// Local. The result of the last dispatch, also if that has delivered its rows and thrown, as for ids out
  /// of range.
  DispatchResult last_dispatch_result() const;

  /// Local. In place of dispatch(): ends the peers' dispatch with this error. For bindings.
  void refuse_dispatch(const Error& error) noexcept;

  /// Writes `result` [N, H], dense, of the exchange's type, in device memory aligned to 16 bytes: each
  /// token's rows added in fp32 from +0 in rank order and rounded once, NaN as docs/formats.md says; zeros
  /// for a token without rows. `tokens` is N of the dispatch.
  void combine(const CombineInput& input, std::int64_t tokens, void* result, Stream stream = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ferry::nvfuser
