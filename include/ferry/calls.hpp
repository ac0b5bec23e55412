// Arguments, options and results of the operations of an exchange (ferry/exchange.hpp).
//
// Shapes use the symbols of ferry/types.hpp: N tokens, K slots, H columns, E experts, G groups, R ranks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/plan.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Where a call runs.
struct CallOptions {
  int lane = 0;
  Stream stream{};  ///< device backends: the call is enqueued on it
  /// On device memory: most thread blocks, each of which takes a multiprocessor, of a kernel that moves rows
  /// of dispatch, combine, route_values and return_values. 0: as many as the lane may have, the
  /// multiprocessors of the device divided by its ranks and by the lanes. More than those are a UsageError on
  /// several lanes, and the same as 0 on one. Below 0 is a UsageError. Receive phases have the limit of their
  /// send phase, whatever this is; other calls have none.
  int sm_limit = 0;
};

/// A count in host memory, or the address of one in device memory, which is read when the call runs.
struct Count {
  Count(std::int32_t count) : value(count) {}
  Count(const std::int32_t* address) : on_device(true), device(address) {}

  std::int32_t value = 0;
  bool on_device = false;
  const std::int32_t* device = nullptr;
};

/// Rows of this rank's tokens, [N, H], read by dispatch. Row addresses, strides and the bytes of a row are
/// multiples of 16.
struct Tokens {
  std::array<const void*, kMaxParts> parts{};  ///< part 0 holds the values; raw formats use one entry a part
  std::array<std::int64_t, kMaxParts> strides{};  ///< bytes from one row to the next; 0: rows are dense
  std::int64_t count = 0;                         ///< N, at most Config::max_tokens
  DType type = DType::bf16;                       ///< of the values; not used by raw formats
  /// Device backends: address of N in device memory, read when the call runs; `count` is then an upper bound.
  /// An N that is negative or above the bound sends nothing, and check() reports it.
  const std::int32_t* device_count = nullptr;

  /// Tokens of one part: `data` [count, H], `stride` bytes apart (0: dense).
  static Tokens rows(const void* data, std::int64_t count, DType type = DType::bf16,
                     std::int64_t stride = 0) {
    return {.parts = {data}, .strides = {stride}, .count = count, .type = type};
  }
};

/// Expert ids, [N, K], dense. -1 masks a slot. A token may list an expert more than once. Null only if
/// N is 0.
struct Ids {
  Ids() = default;
  Ids(const std::int32_t* ids) : data(ids), type(IdType::int32) {}
  Ids(const std::int64_t* ids) : data(ids), type(IdType::int64) {}

  const void* data = nullptr;
  IdType type = IdType::int32;
};

/// Caller's memory for the arrays of a DispatchResult. Each null pointer selects the lane's own memory, which
/// the lane's next dispatch overwrites. "capacity" is in rows (expert_padded: G * capacity).
struct ReceiveBuffers {
  /// `capacity` rows (expert_indexed: R*T) as in ReceivedPart, aligned to 16 bytes; or ceil(capacity / 128) +
  /// G rows of tiles.
  std::array<void*, kMaxParts> parts{};
  float* weight = nullptr;               ///< [capacity]; rank_major: [capacity, K]
  std::int32_t* local_ids = nullptr;     ///< rank_major: [capacity, K]
  std::int32_t* group_of_row = nullptr;  ///< [capacity]; the lane has no memory of its own for this array
  void* plan = nullptr;                  ///< plan_bytes(config, ranks) bytes, aligned to 16; from ids only
  std::int32_t* counts = nullptr;        ///< [G]
  std::int32_t* row_offsets = nullptr;   ///< [G + 1]; its last entry is the total
  float* dots = nullptr;                 ///< [capacity], with DispatchOptions::dot_rows
  std::int32_t* count_sums = nullptr;    ///< [G]; the call adds `counts` to it; the lane has none of its own
  /// Rows that the arrays of [capacity] have room for, in a dispatch from ids; 0: the capacity. Take it from
  /// dispatch_counts(). If more arrive, every rank gets an OverflowError; those past it are not stored and
  /// have no row in the plan of this rank, while counts and row_offsets include them. Not with expert_padded,
  /// expert_indexed, scales in columns or tiles, or dot_rows.
  std::int64_t rows = 0;
  /// More than `rows` rows on this rank are no error: compare `total` with it.
  bool allow_truncation = false;
};

/// One part of the received rows.
struct ReceivedPart {
  void* data = nullptr;
  /// Bytes of a row of this part. column_major scales: of one element. Scales as tiles: of a row of tiles.
  std::int64_t row_bytes = 0;
  /// column_major scales: elements from one column to the next, a multiple of 4; else 0. expert_padded: each
  /// group has columns of its own, of that length, and columns of group g follow those of group g - 1.
  std::int64_t leading_dimension = 0;
};

/// The total of a dispatch in host memory, for code that cannot wait for the stream.
///
/// Load `call` with acquire. Once it is the number of the dispatch, `total` may be read, and nothing else may
/// be concluded. Host backends write it last. Device backends write it as soon as the total is known, so that
/// work can be enqueued while rows are still being received.
struct HostTotals {
  std::uint64_t call = 0;  ///< call number of the dispatch that wrote `total`
  std::int64_t total = 0;  ///< row_offsets[G]
};

/// The rows that this rank has received, and their sources. docs/contract.md defines the order of rows.
///
/// Groups are the shared experts, then this rank's experts in local order; with rank_major they are the
/// source ranks. Rows past the total are neither written nor read. With expert_indexed the arrays of rows are
/// by position, but for `data`, `parts` and `source`, which have a row for each token that has an expert
/// here.
///
/// Ownership: the memory belongs to the lane, whose next dispatch overwrites it, or to the caller
/// (ReceiveBuffers). Device backends return addresses of device memory, apart from `host`.
struct DispatchResult {
  void* data = nullptr;                         ///< the values: parts[0].data
  std::array<ReceivedPart, kMaxParts> parts{};  ///< formats with scales: values, then scales
  int groups = 0;                               ///< G
  std::int64_t capacity = 0;                    ///< in rows; expert_padded: rows of one expert
  const std::int32_t* counts = nullptr;         ///< [G] rows of each group, padding excluded
  const std::int32_t* row_offsets = nullptr;    ///< [G + 1] first row of each group
  const std::int32_t* total = nullptr;          ///< [1] row_offsets[G]
  const std::int32_t* group_expert =
      nullptr;  ///< [G] global expert id of each group; shared expert s: E + s; rank_major: -1
  const Source* source = nullptr;  ///< [total]; expert_indexed: [row_total], slot -1
  const float* weight = nullptr;   ///< [total]; rank_major: [total, K]; null unless the call is `weighted`
  const std::int32_t* local_ids = nullptr;     ///< rank_major: [total, K] local expert of each slot, or -1
  const std::int32_t* group_of_row = nullptr;  ///< [total], -1 on padding; null unless memory was passed
  const float* dots = nullptr;                 ///< [total]; null without DispatchOptions::dot_rows
  /// [G + 1] first row of tiles of each group, with scales as tiles; null otherwise. The tiles of group g
  /// are parts[1].row_bytes * tile_offsets[g] bytes from parts[1].data. They are the lane's memory.
  const std::int32_t* tile_offsets = nullptr;
  // expert_indexed; null or 0 with other layouts. They are the lane's memory.
  const std::int32_t* index = nullptr;  ///< [total] the row of each position; `row_capacity` on padding
  /// [total] the slot of each position at its source, K + s of shared expert s; -1 on padding
  const std::int32_t* slot = nullptr;
  /// [capacity / alignment] the group of each block of `alignment` positions; -1 from the total on
  const std::int32_t* block_group = nullptr;
  const std::int32_t* source_offsets = nullptr;  ///< [R + 1] first row of each source rank
  const std::int32_t* row_total = nullptr;       ///< [1] source_offsets[R]
  std::int64_t row_capacity = 0;                 ///< R*T: rows there is room for
  const HostTotals* host = nullptr;              ///< in host memory
  /// Call number on the lane. A captured call gets a new number in each replay: see HostTotals::call.
  std::uint64_t call = 0;
  Plan plan;  ///< pass it to combine()
};

/// Options of a dispatch. All ranks pass the same format, apply_weights and `weighted`.
struct DispatchOptions {
  CallOptions call{};
  std::optional<Format> format{};  ///< default: Config::format
  ReceiveBuffers memory{};         ///< default: the lane's own memory
  /// Multiplies every received value by its weight: round(w * x). Not with formats that quantise, raw or
  /// rank_major.
  bool apply_weights = false;
  /// The dispatch carries weights, so DispatchResult::weight is not null. Weights that are not null and
  /// apply_weights say so, too: only a rank without tokens that passes null needs it.
  bool weighted = false;
  /// Rows v, [total, H] of type Config::combine_type, dense. Dispatch then returns dots[row] = dot(x, v[row])
  /// with x the row before it is multiplied by its weight. Not with formats that quantise, raw or rank_major.
  const void* dot_rows = nullptr;
  /// nvfp4 without `per_token`: address of g, one fp32 in host memory, on device backends in memory that the
  /// device can read; read in the send phase. Null: g = 1. The ranks pass the same g, which is not
  /// compared, because the host of a device backend does not know it. A g that is not positive and finite, or
  /// so large that s * g overflows fp32, gives scales 7F and values 0, and check() raises UsageError.
  const float* global_scale = nullptr;
  /// [E + S] a scale of each expert, shared experts last, in host memory, on device backends in memory that
  /// the device can read; read in the send phase. Tokens then travel in their own type, and each rank
  /// encodes the rows that it receives with its own scales: nvfp4 with g = scale, mxfp8 from x / scale, fp8
  /// as e4m3(x / scale) in one part without block scales. Config::format must have room for the tokens as
  /// they are. All ranks pass scales and tokens of one type, or none does; the scales are not compared.
  /// Expert layouts only. A scale of one of the rank's experts that is not positive and finite is refused; on
  /// device memory check() raises UsageError where a row is encoded with it.
  std::span<const float> input_scales{};
  /// Where load_counts() counts the routes: a layer in [0, Config::layers). The ranks pass the same, which is
  /// not compared.
  int layer = 0;
};

/// The experts' outputs, [total, H]: one row for each received row. Rows past the total are not read. The
/// address and the stride are multiples of 16 bytes.
struct Outputs {
  const void* data = nullptr;
  DType type = DType::bf16;  ///< combine converts to Config::combine_type where they differ
  std::int64_t stride = 0;   ///< bytes from one row to the next; 0: dense
  /// Rows that `data` holds, of which none may overlap what the call writes. 0: not said; then the total
  /// counts, or the first byte where the host does not know the total.
  std::int64_t rows = 0;
};

/// Where combine writes: [N, H]. unreduced: [N, K, H]. Zero for a token without delivered routes. The address
/// and the stride are multiples of 16 bytes.
struct Result {
  void* data = nullptr;
  DType type = DType::bf16;
  std::int64_t stride = 0;  ///< bytes from one row to the next (unreduced: from slot to slot); 0: dense
  /// Rows that `data` holds: N or more are needed (unreduced: N * K). 0: not said. Checked where the host
  /// knows N: not on device memory, and not with experts in slices.
  std::int64_t rows = 0;
};

/// A last step of combine: each value y of the result, after it has been rounded to the result's type,
/// becomes round(fma(scale, y, r)), with r of the residual row of the token. The bits are those of a separate
/// pass over the result. On host memory the row is still in a cache; device backends launch a kernel after
/// the combine. Not with unreduced.
struct Epilogue {
  /// [N, H] of the result's type; null: nothing is added. Address and stride are multiples of 16 bytes. It
  /// may be the result itself (same address and stride), which is then added to: x += moe(x).
  const void* residual = nullptr;
  std::int64_t stride = 0;  ///< bytes from one residual row to the next; 0: dense
  float scale = 1.0f;

  bool empty() const { return residual == nullptr && scale == 1.0f; }
};

/// Options of a combine. At most one of row_weights and topk_weights is passed; without both, every weight
/// is 1. rank_major takes `partial` without weights and values; `unreduced` takes no weights. All ranks pass
/// the same reduction.
struct CombineOptions {
  CallOptions call{};
  /// [total] weights of the rows, such as DispatchResult::weight. Given by all ranks that have rows, or by
  /// none.
  const float* row_weights = nullptr;
  /// [N, K] weights of this rank's slots. With `partial` they are sent to the experts' ranks first: then
  /// either all ranks pass them, ranks without tokens too, or none. Null only if N is 0.
  const float* topk_weights = nullptr;
  /// The combine takes topk_weights. A pointer that is not null says so, too: only a rank without tokens that
  /// passes null needs it.
  bool topk_weighted = false;
  std::optional<Reduction> reduction{};  ///< default: Config::reduction
  const float* row_values = nullptr;     ///< [total] one fp32 of each row, returned to its source rank ...
  float* route_values = nullptr;         ///< ... as [N, K]; 0 where the slot is masked or was dropped
  /// [S, N, H] of the result's type, dense: takes the outputs of the shared experts, which are then not
  /// added. +0 where a shared row was dropped. `unreduced` needs it. Each rank may choose for itself.
  void* shared_outputs = nullptr;
  Epilogue epilogue{};  ///< the residual is read in the receive phase; each rank may choose for itself
};

/// Result of Exchange::metadata(), from the counts of all ranks. The lane's next metadata() overwrites it.
struct StepMetadata {
  std::int32_t sum = 0;
  std::int32_t prefix = 0;  ///< sum over the ranks before this one
  std::int32_t maximum = 0;
};

/// The arguments of all_gather_v(): rows of any size and any number, of which each rank may have another one.
struct AllGather {
  const void* rows = nullptr;  ///< [count, row_bytes], dense; may be null if count is 0
  std::int64_t count = 0;      ///< rows of this rank
  std::int64_t row_bytes = 0;  ///< the same on all ranks
  /// Takes [the sum of all counts, row_bytes]. `rows` may be this rank's rows in it, those from the sum of
  /// the counts of the ranks before.
  void* gathered = nullptr;
  std::int64_t capacity = 0;  ///< rows that `gathered` has room for; rows past the sum are not written
  /// Device backends: the number of rows is read from here when the call runs, and is 0 to `count`; another
  /// number counts as 0, and is reported by synchronize(), or over an engine by the call of every rank.
  const std::int32_t* device_count = nullptr;
};

/// The arguments of reduce_scatter_v().
struct ReduceScatter {
  const void* rows =
      nullptr;             ///< [total, H] of `type`, dense; the first counts[0] rows belong to rank 0, ...
  std::int64_t total = 0;  ///< the sum of all ranks' counts
  DType type = DType::bf16;
  void* sums = nullptr;  ///< takes [count, H] of `type`, dense: this rank's rows. They may be those of `rows`
  std::int64_t count = 0;                      ///< rows of this rank
  const std::int32_t* device_count = nullptr;  ///< as in AllGather; `total` may then be larger than the sum
};

/// Counts of what a dispatch would deliver to this rank: Exchange::dispatch_counts(). The arrays belong to
/// the lane, whose next dispatch_counts() overwrites them. They are in host memory with every backend.
struct DispatchCounts {
  std::int64_t total = 0;                ///< row_offsets[G] of the dispatch
  std::span<const std::int32_t> routes;  ///< [L] routes of all ranks to each local expert, drops included;
                                         ///< [local_slots] where Config has them, 0 from L on
  std::span<const std::int32_t> tokens;  ///< [R] N of every rank
};

/// Routes of this exchange's dispatches from ids so far, on all lanes: the same on every rank. Dispatches by
/// a plan are not counted.
struct LoadCounts {
  std::vector<std::int64_t> experts;  ///< [E] routes to each expert
  std::vector<std::int64_t> layers;  ///< [Config::layers, E] routes to each expert, by DispatchOptions::layer
  std::vector<std::int64_t> ranks;   ///< [R] routes to each rank
  std::int64_t dispatches = 0;
};

/// Traffic of this rank to other ranks so far, as a source, as a rank of experts and as a relay. Flags,
/// call numbers, all_gather_v, reduce_scatter_v and the transfers of route_values and return_values are not
/// counted.
struct WireCounts {
  std::int64_t dispatch_bytes = 0, dispatch_messages = 0;
  std::int64_t combine_bytes = 0, combine_messages = 0;

  /// The part of these that went to ranks of other nodes; the rest stayed within the node. 0 with the
  /// backend cuda in one hop.
  struct BetweenNodes {
    std::int64_t dispatch_bytes = 0, dispatch_messages = 0;
    std::int64_t combine_bytes = 0, combine_messages = 0;
  } between_nodes{};
};

/// How long this rank's calls have waited for each peer so far, in nanoseconds, on all lanes. All 0 without
/// Config::count_waits. A wait counts for the peer whose message the rank lacked; while several are missing,
/// for one of them. Where messages pass an engine or take two hops, whole transfers count, and a rank looks
/// about every 10 ms who is missing; the own entry has the waits in which nobody could tell.
struct WaitTimes {
  std::vector<std::int64_t> dispatch;  ///< [R] in dispatches, and in all other calls that `combine` lacks
  std::vector<std::int64_t> combine;   ///< [R] in combine, return_values and reduce_scatter_v
};

}  // namespace ferry
