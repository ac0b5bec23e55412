// Dispatch and combine: the two all-to-all steps of a Mixture-of-Experts layer, and their gradients.
//
//   Exchange exchange(rank, config);                                  // once
//   DispatchResult received = exchange.dispatch(tokens, ids, weights);
//   ... run the experts on the received rows, group by group ...
//   exchange.combine(outputs, received.plan, result, {.row_weights = received.weight});
//
// Shapes use the symbols of ferry/types.hpp: N tokens, K slots, H columns, E experts, G groups, R ranks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "ferry/plan.hpp"

namespace ferry {

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
  /// Part p of `capacity` rows, aligned to 16 bytes. Scales as tiles: ceil(capacity / 128) + G rows of tiles.
  std::array<void*, kMaxParts> parts{};
  float* weight = nullptr;               ///< [capacity]; rank_major: [capacity, K]
  std::int32_t* local_ids = nullptr;     ///< rank_major: [capacity, K]
  std::int32_t* group_of_row = nullptr;  ///< [capacity]; the lane has no memory of its own for this array
  void* plan = nullptr;                  ///< plan_bytes(config, ranks) bytes, aligned to 16; from ids only
  std::int32_t* counts = nullptr;        ///< [G]
  std::int32_t* row_offsets = nullptr;   ///< [G + 1]; its last entry is the total
  float* dots = nullptr;                 ///< [capacity], with DispatchOptions::dot_rows
  std::int32_t* count_sums = nullptr;    ///< [G]; the call adds `counts` to it; the lane has none of its own
  /// Rows that the arrays of [capacity] have room for, in a dispatch from ids; 0: the capacity. If more
  /// arrive, those past it are lost without an error: they are not stored and have no row in the plan of this
  /// rank, while counts and row_offsets include them. Compare `total` with it, or take it from
  /// dispatch_counts(). Not with expert_padded, scales in columns or tiles, or dot_rows.
  std::int64_t rows = 0;
};

/// One part of the received rows.
struct ReceivedPart {
  void* data = nullptr;
  /// Bytes of a row of this part. column_major scales: of one element. Scales as tiles: of a row of tiles.
  std::int64_t row_bytes = 0;
  std::int64_t leading_dimension = 0;  ///< column_major scales: elements from one column to the next; else 0
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
/// source ranks. Rows past the total are neither written nor read.
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
  const Source* source = nullptr;              ///< [total]
  const float* weight = nullptr;               ///< [total]; rank_major: [total, K]; null without weights
  const std::int32_t* local_ids = nullptr;     ///< rank_major: [total, K] local expert of each slot, or -1
  const std::int32_t* group_of_row = nullptr;  ///< [total], -1 on padding; null unless memory was passed
  const float* dots = nullptr;                 ///< [total]; null without DispatchOptions::dot_rows
  /// [G + 1] first row of tiles of each group, with scales as tiles; null otherwise. The tiles of group g
  /// are parts[1].row_bytes * tile_offsets[g] bytes from parts[1].data. They are the lane's memory.
  const std::int32_t* tile_offsets = nullptr;
  const HostTotals* host = nullptr;  ///< in host memory
  /// Call number on the lane. A captured call gets a new number in each replay: see HostTotals::call.
  std::uint64_t call = 0;
  Plan plan;  ///< pass it to combine()
};

/// Options of a dispatch. All ranks pass the same format and the same apply_weights.
struct DispatchOptions {
  std::optional<Format> format{};  ///< default: Config::format
  int lane = 0;
  int sm_limit = 0;         ///< GPU backends: most thread blocks at once; 0: no limit
  ReceiveBuffers memory{};  ///< default: the lane's own memory
  /// Multiplies every received value by its weight: round(w * x). Not with formats that quantise, raw or
  /// rank_major.
  bool apply_weights = false;
  /// Rows v, [total, H] of type Config::combine_type, dense. Dispatch then returns dots[row] = dot(x, v[row])
  /// with x the row before it is multiplied by its weight. Not with formats that quantise, raw or rank_major.
  /// They must not lie in the memory of the received rows.
  const void* dot_rows = nullptr;
  /// nvfp4 without `per_token`: address of g, one fp32 in host memory, on device backends in memory that the
  /// device can read; read in the send phase. Null: g = 1. The ranks pass the same g, which is not
  /// compared, because the host of a device backend does not know it. A g that is not positive and finite, or
  /// with which a block's scale overflows, gives scales 7F and values 0, and check() raises UsageError.
  const float* global_scale = nullptr;
  /// [E + S] a scale of each expert, shared experts last, in host memory, on device backends in memory that
  /// the device can read; read in the send phase. Tokens then travel in their own type, and each rank
  /// encodes the rows that it receives with its own scales: nvfp4 with g = scale, mxfp8 from x / scale, fp8
  /// as e4m3(x / scale) in one part without block scales. Config::format must have room for the tokens as
  /// they are. All ranks pass scales and tokens of one type, or none does; the scales are not compared.
  /// Expert layouts only. A scale of one of the rank's experts that is not positive and finite is refused; on
  /// device memory check() raises UsageError where a row is encoded with it.
  std::span<const float> input_scales{};
};

/// The experts' outputs, [total, H]: one row for each received row. Rows past the total are not read. The
/// address and the stride are multiples of 16 bytes.
struct Outputs {
  const void* data = nullptr;
  DType type = DType::bf16;  ///< combine converts to Config::combine_type where they differ
  std::int64_t stride = 0;   ///< bytes from one row to the next; 0: dense
};

/// Where combine writes: [N, H]. unreduced: [N, K, H]. Zero for a token without delivered routes. The address
/// and the stride are multiples of 16 bytes. Its length is not known to Ferry and not checked. It must not
/// overlap the outputs.
struct Result {
  void* data = nullptr;
  DType type = DType::bf16;
  std::int64_t stride = 0;  ///< bytes from one row to the next (unreduced: from slot to slot); 0: dense
};

/// What combine does with each value y of the result, after it has been rounded to the result's type: y
/// becomes round(fma(scale, y, r)), with r of the residual row of the token. The bits are those of a pass of
/// its own over the result. On host memory the row is still in a cache; device backends launch a kernel
/// behind the combine. Not with unreduced.
struct Epilogue {
  /// [N, H] of the result's type; null: nothing is added. Addresses and strides as of the result, which it
  /// must not overlap.
  const void* residual = nullptr;
  std::int64_t stride = 0;  ///< bytes from one residual row to the next; 0: dense
  float scale = 1.0f;

  bool empty() const { return residual == nullptr && scale == 1.0f; }
};

/// Options of a combine. At most one of row_weights and topk_weights is passed; without both, every weight
/// is 1. rank_major takes `partial` without weights and values; `unreduced` takes no weights. All ranks pass
/// the same reduction.
struct CombineOptions {
  /// [total] weights of the rows, such as DispatchResult::weight. Given by all ranks that have rows, or by
  /// none.
  const float* row_weights = nullptr;
  /// [N, K] weights of this rank's slots. With `partial` they are sent to the experts' ranks first: then
  /// either all ranks pass them, ranks without tokens too, or none.
  const float* topk_weights = nullptr;
  std::optional<Reduction> reduction{};  ///< default: Config::reduction
  const float* row_values = nullptr;     ///< [total] one fp32 of each row, returned to its source rank ...
  float* route_values = nullptr;         ///< ... as [N, K]; 0 where the slot is masked or was dropped
  /// [S, N, H] of the result's type, dense: takes the outputs of the shared experts, which are then not
  /// added. +0 where a shared row was dropped. `unreduced` needs it. Each rank may choose for itself.
  void* shared_outputs = nullptr;
  Epilogue epilogue{};  ///< the residual is read in the receive phase; each rank may choose for itself
  int lane = 0;
  int sm_limit = 0;  ///< GPU backends: most thread blocks at once; 0: no limit
};

/// Result of Exchange::metadata(), from the counts of all ranks. The lane's next metadata() overwrites it.
struct StepMetadata {
  std::int32_t sum = 0;
  std::int32_t prefix = 0;  ///< sum over the ranks before this one
  std::int32_t maximum = 0;
};

/// What a dispatch of some ids delivers to this rank: Exchange::dispatch_counts(). The arrays belong to the
/// lane, whose next dispatch_counts() overwrites them. They are in host memory with every backend.
struct DispatchCounts {
  std::int64_t total = 0;                ///< row_offsets[G] of the dispatch
  std::span<const std::int32_t> routes;  ///< [L] routes of all ranks to each local expert, drops included
  std::span<const std::int32_t> tokens;  ///< [R] N of every rank
};

/// Routes of this exchange's dispatches from ids so far, on all lanes: the same on every rank. Dispatches by
/// a plan are not counted.
struct LoadCounts {
  std::vector<std::int64_t> experts;  ///< [E] routes to each expert
  std::vector<std::int64_t> ranks;    ///< [R] routes to each rank
  std::int64_t dispatches = 0;
};

/// What this rank has sent to other ranks so far, as a source, as a rank of experts and as a relay. Flags,
/// call numbers, all_gather_v, reduce_scatter_v and the transfers of route_values are not counted.
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

class Backend;

/// Dispatches tokens to experts and combines the experts' outputs, for one configuration. Owns the buffers.
///
/// Collective: every rank of the group constructs the exchange, and issues the same operations on a lane in
/// the same order. When a rank refuses its own call, the peers' call of that number ends with the same error.
///
/// Blocking: host backends run in the calling thread and return when the operation is done. Device backends
/// enqueue on `stream` and return immediately; inputs must stay unchanged until the stream has executed the
/// operation. Errors that only the device can see are thrown by synchronize() and check().
///
/// Memory: pointers are host memory with host backends. With device backends they are memory that the
/// exchange's device can access, or pinned host memory. That device is the one that is current in the
/// constructing thread. Ranks that are threads and share a device use a stream each.
///
/// Thread safety: different lanes may be used from different threads at once; one lane may not.
///
/// @throws UsageError  bad argument or data; the exchange stays usable
/// @throws OverflowError  a rank was sent more rows than its capacity; the rows that fit were delivered
/// @throws TimeoutError, PeerLostError  final for the group
class Exchange {
 public:
  /// Collective. Blocks until every rank has constructed its exchange.
  /// @throws UsageError  the configuration is wrong on a rank, or differs between ranks
  /// @throws UnsupportedError  this build or machine has no such backend
  /// @throws SystemError  not enough memory
  Exchange(Rank rank, const Config& config);

  /// Local. Device backends: waits for all work on the rank's device. If ranks share a device, none of them
  /// may start a call that waits for a rank which is still in its destructor: the two would wait for each
  /// other.
  ~Exchange();
  Exchange(const Exchange&) = delete;  // peers write to its memory
  Exchange& operator=(const Exchange&) = delete;

  // Local.
  const Config& config() const;  ///< with every default filled in
  const Rank& rank() const;
  Sizes sizes() const;            ///< bytes that this exchange takes on this rank
  std::int64_t capacity() const;  ///< rows that this rank can receive (expert_padded: rows of one expert)

  /// Sends every token to the ranks that hold its experts, and returns the rows that this rank receives,
  /// arranged by Config::layout.
  ///
  /// The gradient of this operation with respect to the tokens is a combine without weights.
  ///
  /// @param ids  [N, K] expert ids
  /// @param weights  [N, K], or null: given by all ranks that have tokens, or by none. A device backend
  /// cannot know at return what the peers passed: to receive weights, a rank without tokens passes any
  /// address.
  DispatchResult dispatch(const Tokens& tokens, const Ids& ids, const float* weights = nullptr,
                          const DispatchOptions& options = {}, Stream stream = {});
  DispatchResult dispatch(const Tokens& tokens, const Ids& ids, const float* weights, Stream stream) {
    return dispatch(tokens, ids, weights, {}, stream);
  }
  /// Sends every token along the routes of an earlier dispatch: no ids are read. Each rank passes its own
  /// plan of the same dispatch, with the same N.
  DispatchResult dispatch(const Tokens& tokens, const Plan& plan, const float* weights = nullptr,
                          const DispatchOptions& options = {}, Stream stream = {});

  /// The send phase of a dispatch. Waits for no peer's data. When it is done, tokens, ids and weights may be
  /// reused; a plan, DispatchOptions::memory and dot_rows must live until the receive phase is done. Between
  /// the phases, the lane accepts only dispatch_receive(), from this thread or another.
  void dispatch_send(const Tokens& tokens, const Ids& ids, const float* weights = nullptr,
                     const DispatchOptions& options = {}, Stream stream = {});
  void dispatch_send(const Tokens& tokens, const Plan& plan, const float* weights = nullptr,
                     const DispatchOptions& options = {}, Stream stream = {});
  /// The receive phase of the lane's dispatch: blocks and throws as dispatch().
  /// @throws UsageError  no dispatch has been sent on the lane
  DispatchResult dispatch_receive(int lane = 0, Stream stream = {});

  /// Returns the experts' outputs to their source ranks and adds the rows of each token, as Reduction says.
  ///
  /// @param plan  of the dispatch whose rows `outputs` correspond to
  /// @param outputs  one row for each received row; may be null if this rank has received none
  /// @param result  [N, H]; may be null if N is 0. Null on all ranks, as `outputs`, if only route_values are
  /// wanted
  void combine(const Outputs& outputs, const Plan& plan, const Result& result,
               const CombineOptions& options = {}, Stream stream = {});
  /// The send phase of a combine. Waits for no peer's data. When it is done, outputs, row_weights and
  /// row_values may be reused; the plan, the result, shared_outputs, the residual, topk_weights and
  /// route_values must live until the receive phase is done. Between the phases, the lane accepts only
  /// combine_receive(). topk_weights with `partial` are refused, because they need a round trip of their own.
  void combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                    const CombineOptions& options = {}, Stream stream = {});
  /// The receive phase of the lane's combine: blocks and throws as combine().
  /// @throws UsageError  no combine has been sent on the lane
  void combine_receive(int lane = 0, Stream stream = {});

  /// Sends one fp32 of each route, `values` [N, K], to the route's row: `row_values` [total], 0 on padding.
  /// Not with rank_major.
  void route_values(const float* values, const Plan& plan, float* row_values, int lane = 0,
                    Stream stream = {});

  /// The gradients of combine, given the gradient dy of its result.
  ///
  /// Returns the gradient of the experts' outputs: dispatched rows of dy, multiplied by their weights. Writes
  /// the gradient of the weights, d_weights[token, slot] = dot(dy[token], v), with v the slot's row. Not
  /// with rank_major; the format is bf16, fp16 or fp32.
  ///
  /// It consists of a dispatch and a combine on the lane. The result is owned as a dispatch's is.
  ///
  /// @param d_result  dy, [N, H]
  /// @param topk_weights  [N, K]
  /// @param outputs  the rows v that combine was given, [total, H] of type Config::combine_type, dense. They
  /// must not lie in the memory of the received rows, which this call writes
  /// @param d_weights  [N, K]
  DispatchResult combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                  const Outputs& outputs, float* d_weights,
                                  const DispatchOptions& options = {}, Stream stream = {});

  /// Counts what a dispatch of these ids would deliver, without sending rows: for receive buffers of exactly
  /// as many rows as the dispatch that follows needs (ReceiveBuffers::rows).
  ///
  /// Blocks with every backend until all ranks have called it; with device backends also until the work that
  /// is on `stream` has been done. It cannot be captured. Every error is thrown here.
  ///
  /// @param ids  [tokens, K], in memory as for dispatch(). Ids out of range are not counted; the dispatch
  /// reports them.
  DispatchCounts dispatch_counts(const Ids& ids, std::int64_t tokens, int lane = 0, Stream stream = {});

  /// Computes sum, prefix sum and maximum of the ranks' counts. `count` is 0 to (2^31 - 1) / R.
  ///
  /// @param into  the caller's memory for them, int32 [3]; with device backends device memory, which a kernel
  /// on `stream` writes. Null: memory of the lane, at a fixed address.
  /// @return  `into`, or the lane's memory; of the same kind
  const StepMetadata* metadata(std::int32_t count, int lane = 0, Stream stream = {},
                               StepMetadata* into = nullptr);
  /// Device backends: reads the count from device memory when the call runs.
  /// @throws UnsupportedError  host backends
  const StepMetadata* metadata(const std::int32_t* device_count, int lane = 0, Stream stream = {},
                               StepMetadata* into = nullptr);

  /// Copies the rows of all ranks to every rank, one rank's after another's in rank order. Ranks may have
  /// different numbers of rows, also none.
  ///
  /// Rows of any size and any number of them may be gathered: larger calls go through the lane's dispatch
  /// staging in rounds, so the exchange takes no memory for it (Sizes).
  ///
  /// @param rows  [count, row_bytes], dense; may be null if count is 0
  /// @param row_bytes  the same on all ranks
  /// @param gathered  takes [the sum of all counts, row_bytes]; must not overlap `rows`
  /// @param capacity  rows that `gathered` has room for; rows past the sum are not written
  /// @param device_count  device backends: the number of rows is read from here when the call runs, and is
  /// 0 to `count`; another number counts as 0, and is reported by synchronize(), or over an engine by the
  /// call of every rank
  /// @return  the sum of all counts; device backends, which do not wait for it: -1
  /// @throws UsageError  on every rank, with nothing written: `gathered` is too small on a rank
  /// @throws UnsupportedError  device_count on host backends
  std::int64_t all_gather_v(const void* rows, std::int64_t count, std::int64_t row_bytes, void* gathered,
                            std::int64_t capacity, int lane = 0, Stream stream = {},
                            const std::int32_t* device_count = nullptr);

  /// Adds what the ranks hold for each row, and gives every rank its own rows of the sum: the first counts[0]
  /// rows belong to rank 0, and so on. The opposite of all_gather_v().
  ///
  /// Each value is added in fp32, in rank order from +0, and rounded once to `type`. Takes no memory of its
  /// own, as all_gather_v().
  ///
  /// @param rows  [total, H] of `type`, dense; `total` is the sum of all ranks' counts
  /// @param sums  [count, H] of `type`, dense: this rank's rows; must not overlap `rows`
  /// @param device_count  as in all_gather_v(); `total` may then be larger than the sum
  /// @throws UsageError  on every rank, with nothing written: `total` is not the sum of the counts on a rank
  /// @throws UnsupportedError  device_count on host backends
  void reduce_scatter_v(const void* rows, std::int64_t total, DType type, void* sums, std::int64_t count,
                        int lane = 0, Stream stream = {}, const std::int32_t* device_count = nullptr);

  /// Takes part in the lane's next call by refusing it: the peers' call ends with `error`. For bindings that
  /// find arguments which they cannot convert. Has no effect where no call could start.
  void refuse(Operation operation, int lane, const Error& error, Stream stream = {}) noexcept;

  /// Local. Throws what the lane's calls since the last check have found. Those calls were carried out all
  /// the same; their rows are in last_dispatch_result().
  ///
  /// Host backends call it at the end of every call, unless Config::check_calls is off. On device backends it
  /// covers the calls that have ended, and also throws what synchronize() would; it does not wait, and may be
  /// called while a stream is captured: the captured calls end when the graph is launched.
  /// @throws OverflowError, BadIdError, BadSourceError  the first that applies, in this order
  void check(int lane = 0);

  /// Local. Device backends: blocks until the work on `stream` is done, then throws the error that ended a
  /// call of the lane on the device: a peer's refusal, options that differ between ranks, a count or plan
  /// that only the device could check, a timeout, a lost peer. Host backends have already thrown: no effect.
  /// @throws UsageError  the stream is being captured; the capture goes on
  void synchronize(int lane = 0, Stream stream = {});

  /// Local. Result of the lane's last dispatch; empty if it failed. Valid until the lane's next dispatch.
  const DispatchResult& last_dispatch_result(int lane = 0) const;

  /// Local. Any thread may call it at any time, also while calls run or a stream is captured; it counts the
  /// dispatches that have run.
  LoadCounts load_counts() const;
  WireCounts wire_counts() const;  ///< Local. As load_counts().

 private:
  friend class ExchangeAccess;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ferry
