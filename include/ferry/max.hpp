// Dispatch and combine in the call shapes of MAX's expert-parallel kernels: combine takes src_info,
// row_offsets and counts in place of a plan.
//
//   max::Exchange exchange(rank, config);
//   max::DispatchResult received = exchange.ep_fused_dispatch(tokens, topk_ids);
//   ... run the experts on received.output_tokens, group by group ...
//   exchange.ep_fused_combine({outputs, received}, {.output_tokens = result, .router_weights = weights});
//
// docs/guides/max.md explains the arrays. Shapes use the symbols of ferry/types.hpp; `rows` is the last entry
// of row_offsets, `number` is expert_usage_stats[1].
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/exchange.hpp"
#include "ferry/group.hpp"

namespace ferry::max {

/// The groups that have rows: where their rows begin, and which groups they are.
struct GroupIndex {
  /// [number + 1] first row of each group that has rows, then the number of rows
  std::vector<std::uint32_t> row_offsets;
  /// [number] those groups, ascending: indexes of `counts`
  std::vector<std::int32_t> expert_ids;

  int number() const { return static_cast<int>(expert_ids.size()); }
};

/// Counts [2, 0, 3] give row_offsets [0, 2, 5], expert_ids [0, 2] and number 2.
///
/// @param counts  rows of each group
/// @param alignment  every group begins at a multiple of it
/// @throws UsageError  a count is negative, or there are 2^31 rows or more
GroupIndex group_index(std::span<const std::int32_t> counts, int alignment = 1);

/// MAX's skip_a2a: `config` for an Exchange whose ranks all pass the same tokens and ids. Nothing travels,
/// and a combine gives each rank the sum of its own experts' rows, as Reduction::partial: an all-reduce of
/// the caller's adds the ranks.
///
/// Sets Config::input to replicated and, with shared experts, Config::shared_split.
///
/// @param allreduce_world_size  W, 0 to R: ranks r < W take tokens [r*N/W, (r+1)*N/W) as their rows of shared
/// experts. 0: every rank takes all
Config skip_a2a(Config config, int allreduce_world_size = 1);

/// Options of a dispatch. All ranks pass the same encoding: see ferry::DispatchOptions.
struct DispatchOptions {
  CallOptions call{};
  std::optional<Format> format{};         ///< default: Config::format
  const float* global_scale = nullptr;    ///< nvfp4: address of g; null: g = 1
  std::span<const float> input_scales{};  ///< [E + S] a scale of each expert, shared experts last
};

/// What a rank has received: memory of the lane, whose next dispatch overwrites it. Groups are the shared
/// experts, then this rank's experts in local order; a group's rows are in the order of source rank, token,
/// slot. In device memory the host does not know how many rows there are, and the arrays have the lengths in
/// brackets.
struct DispatchResult {
  const void* output_tokens = nullptr;  ///< [rows, H] values
  /// All parts of the rows, as ferry::DispatchResult: formats with scales: values, scales, nvfp4 with a scale
  /// for each token also that; raw formats: each part.
  std::array<ReceivedPart, kMaxParts> parts{};
  const std::int32_t* tile_offsets = nullptr;  ///< [S + L + 1] as ferry::DispatchResult
  /// [number + 1], as GroupIndex. (Device: [groups + 1], from entry `number` on the number of rows)
  std::span<const std::uint32_t> row_offsets;
  /// [number], as GroupIndex: with S = 0 local expert ids. (Device: [groups], -1 from entry `number` on)
  std::span<const std::int32_t> expert_ids;
  const std::uint32_t* expert_usage_stats = nullptr;  ///< [2] the most rows of a group, and `number`
  /// [rows, 2] {token, slot} at the source rank; {-1, -1} on padding; slot K + s for shared expert s.
  /// (Device: [capacity, 2]; rows past the number of rows are not written)
  std::span<const std::int32_t> src_info;
  std::span<const std::int32_t> counts;  ///< [groups, R] rows of each group from each source rank
  std::int64_t capacity = 0;             ///< rows that there can be
  int groups = 0;                        ///< S + L
  std::uint64_t call = 0;                ///< call number on the lane; 0: it has delivered no dispatch
};

/// What combine reads: the experts' outputs, three arrays of the DispatchResult or copies of them, and the
/// ids that this rank dispatched.
struct CombineInput {
  CombineInput() = default;
  CombineInput(const Outputs& outputs, const DispatchResult& received)
      : input_tokens(outputs),
        src_info(received.src_info),
        row_offsets(received.row_offsets),
        counts(received.counts) {}

  Outputs input_tokens;  ///< [rows, H]
  std::span<const std::int32_t> src_info;
  std::span<const std::uint32_t> row_offsets;
  std::span<const std::int32_t> counts;
  /// The ids of the dispatch, [tokens, K], and its N. With -1 tokens: those of the lane's last dispatch,
  /// which the lane keeps.
  Ids topk_ids{};
  std::int64_t tokens = -1;
};

/// Where combine writes, and how it adds.
struct CombineOutput {
  /// [N, H]: the rows of a token added in slot order, as Reduction::exact, or with skip_a2a() as
  /// Reduction::partial. With Config::reduction = unreduced [N, K, H]: every row by itself.
  Result output_tokens;
  /// [N, K]; null: every weight is 1. Not with unreduced, and with skip_a2a() not in ep_combine_async()
  const float* router_weights = nullptr;
  /// [S, N, H] of the result's type, dense: takes the outputs of the shared experts, which are then not
  /// added. `unreduced` needs it.
  void* shared_outputs = nullptr;
  Epilogue epilogue{};  ///< scale, and a residual that is added; not with unreduced
};

/// Dispatch and combine for one configuration, in host or in device memory as `config` says.
///
/// Collective: every rank constructs it and makes the same calls of a lane in the same order. The async calls
/// are the send phases of Exchange and the wait calls its receive phases: what may be reused when is said
/// there. Different lanes may be used from different threads.
///
/// In device memory every array is device memory that kernels on the call's stream read and write. Calls are
/// enqueued and return, so nothing waits on the host and a call can be captured into a CUDA graph.
/// Tokens::device_count may give N. Arrays that are wrong end the combine on every rank with a UsageError
/// that synchronize() throws; the rank whose arrays they are names the numbers. An id out of range is
/// reported by check().
///
/// @throws UsageError  an argument of one rank is wrong: on every rank; the exchange stays usable
/// @throws UsageError  arrays of different dispatches, from ep_combine_wait() on the rank that misses a row
/// @throws BadIdError  ids out of range, on their rank, when the dispatch is complete
/// @throws TimeoutError, PeerLostError  final for the group
class Exchange {
 public:
  /// The layout is expert_major, nothing is dropped (`capacity` is 0, `repeats` is set), and the reduction is
  /// unreduced if `config` says so, else exact, with replicated input partial. Everything else is as in
  /// `config`.
  /// @throws UnsupportedError  experts in slices
  /// @throws UsageError  another layout, a capacity, gathered input, own_receive_buffers or
  /// (in host memory) check_calls switched off, or as ferry::Exchange
  Exchange(const Rank& rank, const Config& config);
  ~Exchange();

  const Config& config() const;  ///< with every default filled in
  const Rank& rank() const;

  /// Sends every token to the ranks of its experts, `topk_ids` [N, K]; -1 masks a slot.
  void ep_dispatch_async(const Tokens& input_tokens, const Ids& topk_ids,
                         const DispatchOptions& options = {});
  DispatchResult ep_dispatch_wait(const CallOptions& call = {});
  DispatchResult ep_fused_dispatch(const Tokens& input_tokens, const Ids& topk_ids,
                                   const DispatchOptions& options = {});

  /// The result of the lane's last dispatch, also if that has delivered its rows and thrown, as for ids out
  /// of range. In device memory a kernel on the call's stream writes its arrays.
  DispatchResult last_dispatch_result(const CallOptions& call = {}) const;

  /// Returns every row to the rank, token and slot it came from. Every rank calls it.
  void ep_combine_async(const CombineInput& input, const CombineOutput& output, const CallOptions& call = {});
  void ep_combine_wait(const CallOptions& call = {});
  void ep_fused_combine(const CombineInput& input, const CombineOutput& output, const CallOptions& call = {});

  /// Waits for the stream and throws the error of a call that has ended with one.
  void synchronize(const CallOptions& call = {});
  /// synchronize() without waiting; also throws what completed calls have found, such as BadIdError.
  void check(int lane = 0);

  /// Takes part in the lane's next call, Operation::dispatch or combine, by refusing it, as
  /// ferry::Exchange::refuse() does. For bindings that find arguments which they cannot convert.
  void refuse(Operation operation, const Error& error, const CallOptions& call = {}) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ferry::max
