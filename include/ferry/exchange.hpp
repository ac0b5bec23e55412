// Dispatch and combine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "ferry/plan.hpp"

namespace ferry {

// Rows of this rank's tokens [count, hidden]. Raw formats bring one pointer for each part.
struct Tokens {
  std::array<const void*, kMaxParts> parts{};
  std::array<std::int64_t, kMaxParts> strides{};  // bytes from row to row; 0: rows lie dense
  std::int64_t count = 0;                         // N
  DType type = DType::bf16;                       // of the values; raw parts have none
  // Device backends: N in device memory, read when the call runs; `count` is then the most it may be. A
  // larger or negative one sends nothing and is reported by check().
  const std::int32_t* device_count = nullptr;

  static Tokens rows(const void* data, std::int64_t count, DType type = DType::bf16,
                     std::int64_t stride = 0) {
    return {.parts = {data}, .strides = {stride}, .count = count, .type = type};
  }
};

// Expert ids [count, top_k], dense: -1 masks a slot, an expert may stand twice.
struct Ids {
  Ids() = default;
  Ids(const std::int32_t* ids) : data(ids), type(IdType::int32) {}
  Ids(const std::int64_t* ids) : data(ids), type(IdType::int64) {}

  const void* data = nullptr;
  IdType type = IdType::int32;
};

// Memory for arrivals. A null pointer means the lane's own memory, which the lane's next dispatch overwrites.
struct ReceiveBuffers {
  std::array<void*, kMaxParts> parts{};  // part p: capacity rows (values first, then scales)
  float* weight = nullptr;               // [capacity]; rank_major [capacity, top_k]
  std::int32_t* local_ids = nullptr;     // rank_major [capacity, top_k]
  std::int32_t* group_of_row = nullptr;  // [capacity], written only if given: group of a row, -1 on padding
  void* plan = nullptr;                  // plan_bytes(config, ranks) bytes, aligned to 16
  std::int32_t* counts = nullptr;        // [G]
  std::int32_t* row_offsets = nullptr;   // [G + 1], and so the total
  float* dots = nullptr;                 // [capacity], with DispatchOptions::dot_rows
};

// One part of the arrived rows.
struct ReceivedPart {
  void* data = nullptr;
  std::int64_t row_bytes = 0;          // bytes of a row of this part (column_major: of one row's one element)
  std::int64_t leading_dimension = 0;  // column_major scales: elements from column to column; 0 for rows
};

// Totals in host memory, written by the call itself; whoever loads `call` with acquire and finds its number
// there may read `total`, and no more by that. Host backends write them after everything else; device
// backends as soon as they are known, so that more work can be put on the stream while rows still arrive.
struct HostTotals {
  std::uint64_t call = 0;
  std::int64_t total = 0;
};

// What dispatch returns. Memory belongs to the lane, until its next dispatch, or to the caller
// (ReceiveBuffers). Groups are this rank's experts, in local order; for rank_major the source ranks. Rows
// past the total are never written or read. See docs/contract.md for the order of rows.
struct DispatchResult {
  void* data = nullptr;  // values: parts[0].data
  std::array<ReceivedPart, kMaxParts> parts{};
  int groups = 0;                              // G
  std::int64_t capacity = 0;                   // rows; expert_padded: rows an expert
  const std::int32_t* counts = nullptr;        // [G] rows of a group, padding not counted
  const std::int32_t* row_offsets = nullptr;   // [G+1] first row of a group
  const std::int32_t* total = nullptr;         // one number: row_offsets[G]
  const std::int32_t* group_expert = nullptr;  // [G] global expert id of a group; rank_major: -1
  const Source* source = nullptr;              // [total]
  const float* weight = nullptr;               // [total], rank_major [total, top_k]; null without weights
  const std::int32_t* local_ids = nullptr;     // rank_major [total, top_k]: local expert, or -1
  const std::int32_t* group_of_row = nullptr;  // [total] if memory was given for it
  const float* dots = nullptr;                 // [total] if DispatchOptions::dot_rows was given
  const HostTotals* host = nullptr;
  std::uint64_t call = 0;  // call number on the lane; replays of a captured call take numbers of their own
  Plan plan;
};

struct DispatchOptions {
  std::optional<Format> format{};  // default: Config::format
  int lane = 0;
  int sm_limit = 0;  // GPU backends: most blocks at once; 0: no limit
  ReceiveBuffers memory{};
  bool apply_weights =
      false;  // values arrive multiplied by their weight: round(w * x); not with fp8, raw, rank_major
  const void* dot_rows =
      nullptr;  // rows v [total, hidden] of Config::combine_type type: dots[row] = dot(x before weighing, v)
};

// The experts' outputs, row for row as the arrivals lay. Rows past the total are never read.
struct Outputs {
  const void* data = nullptr;
  DType type = DType::bf16;  // rounded to Config::combine_type where they differ
  std::int64_t stride = 0;   // bytes from row to row; 0: dense
};

// Where combine writes: [tokens, hidden]; unreduced [tokens, top_k, hidden] with `stride` from slot to slot.
struct Result {
  void* data = nullptr;
  DType type = DType::bf16;
  std::int64_t stride = 0;  // bytes from row to row; 0: dense
};

struct CombineOptions {
  const float* row_weights = nullptr;  // weights that travelled: DispatchResult::weight, one a row
  // [tokens, top_k] at home instead; neither: every weight is 1. With partial they travel first: then not
  // null on any rank, also without tokens.
  const float* topk_weights = nullptr;
  std::optional<Reduction> reduction{};  // default: Config::reduction
  const float* row_values = nullptr;     // one fp32 a row that comes home ...
  float* route_values = nullptr;         // ... as [tokens, top_k], 0 where masked or dropped
  int lane = 0;
  int sm_limit = 0;
};

// [sum, prefix before this rank, maximum] of every rank's count.
struct StepMetadata {
  std::int32_t sum = 0;
  std::int32_t prefix = 0;
  std::int32_t maximum = 0;
};

// Tokens seen so far by this exchange, all lanes, on every rank alike.
struct LoadCounts {
  std::span<const std::int64_t> experts;  // [E] routes to every expert
  std::span<const std::int64_t> ranks;    // [R] routes to every rank
  std::int64_t dispatches = 0;
};

// Bytes of messages that this rank has written to other ranks' memory, and how many messages; what announces
// them, such as flags, or call numbers between the bytes of a row, is not counted.
struct WireCounts {
  std::int64_t dispatch_bytes = 0, dispatch_messages = 0;
  std::int64_t combine_bytes = 0, combine_messages = 0;
};

class Backend;

// Owns the buffers of one configuration on one rank. Construction and every operation are collective: all
// ranks call the same operations of a lane in the same order. Host backends work in the calling thread and
// return when the operation is done; two lanes may be used by two threads at once. Device backends enqueue
// on the stream and return; the rank's device is the calling thread's current one at construction. Errors of
// a call (UsageError, OverflowError) leave the exchange usable; TimeoutError and PeerLostError are final for
// the group. A call that this rank refuses ends the peers' call of that number with the same error.
class Exchange {
 public:
  Exchange(Rank rank, const Config& config);
  // Not collective. Waits for all that the rank's device has been given; ranks that share a device must not
  // start calls that wait for a rank which is still in here.
  ~Exchange();
  Exchange(const Exchange&) = delete;  // owns memory that peers write to
  Exchange& operator=(const Exchange&) = delete;

  const Config& config() const;  // with every default filled in
  const Rank& rank() const;
  Sizes sizes() const;
  std::int64_t capacity() const;

  // Sends every token to the ranks of its experts and lays the arrivals out. `weights` [count, top_k] or
  // null. Device backends do not know at return what the peers gave: a rank without tokens gives weights (any
  // pointer it may read nothing from) if it wants those that arrive.
  DispatchResult dispatch(const Tokens& tokens, const Ids& ids, const float* weights = nullptr,
                          const DispatchOptions& options = {}, Stream stream = {});
  DispatchResult dispatch(const Tokens& tokens, const Ids& ids, const float* weights, Stream stream) {
    return dispatch(tokens, ids, weights, {}, stream);
  }
  // The same routes again, from a plan: no ids are read. The plan may be the lane's last or a kept one.
  DispatchResult dispatch(const Tokens& tokens, const Plan& plan, const float* weights = nullptr,
                          const DispatchOptions& options = {}, Stream stream = {});

  // The split form. The send half waits for no peer's data; tokens, ids and weights may be reused after it.
  // The receive half may run in another thread. Between halves nothing of Ferry runs.
  void dispatch_send(const Tokens& tokens, const Ids& ids, const float* weights = nullptr,
                     const DispatchOptions& options = {}, Stream stream = {});
  void dispatch_send(const Tokens& tokens, const Plan& plan, const float* weights = nullptr,
                     const DispatchOptions& options = {}, Stream stream = {});
  DispatchResult dispatch_receive(int lane = 0, Stream stream = {});

  // Brings the experts' outputs home and adds them. `result` may be empty if only route_values are wanted.
  void combine(const Outputs& outputs, const Plan& plan, const Result& result,
               const CombineOptions& options = {}, Stream stream = {});
  // Home weights with `partial` need a round trip of their own and are refused in the split form. The plan,
  // the result and home weights are used by the receive half too and must live until it ends.
  void combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                    const CombineOptions& options = {}, Stream stream = {});
  void combine_receive(int lane = 0, Stream stream = {});

  // Carries one fp32 a route [tokens, top_k] to its row: values[row], padding 0.
  void route_values(const float* values, const Plan& plan, float* row_values, int lane = 0,
                    Stream stream = {});

  // Gradients of combine: rows of dy times their weight (as DispatchResult), and d_weights[token, slot] =
  // dot(dy, v) brought home. `outputs` are the rows combine was given, in Config::combine_type type.
  DispatchResult combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                  const Outputs& outputs, float* d_weights,
                                  const DispatchOptions& options = {}, Stream stream = {});

  // [sum, prefix before me, maximum] of the ranks' counts, at a fixed address of the lane (device backends:
  // in device memory).
  const StepMetadata* metadata(std::int32_t count, int lane = 0, Stream stream = {});
  // Device backends: the count is read from device memory when the call runs.
  const StepMetadata* metadata(const std::int32_t* device_count, int lane = 0, Stream stream = {});

  // Takes this rank's part in the lane's next call by refusing it: the peers' call ends with `error`. For
  // bindings that find arguments wrong which they cannot hand on. Does nothing where no call could start.
  void refuse(Operation operation, int lane, const Error& error, Stream stream = {}) noexcept;

  // Throws what the lane's calls since the last check found: BadIdError, OverflowError, BadSourceError. Host
  // backends call it at the end of every call unless Config::check_calls is off; the call has been carried
  // out all the same, and its arrivals are to be had by last_dispatch_result(). On device backends it reads
  // what calls that have ended left behind, and throws what synchronize() would as well.
  void check(int lane = 0);

  // Device backends: blocks until `stream` has done its work, then throws what ended a call of the lane on
  // the device: a peer's refusal, options that differ, a count or plan that only the device saw, a timeout, a
  // lost peer. Host backends have thrown all that already.
  void synchronize(int lane = 0, Stream stream = {});
  const DispatchResult& last_dispatch_result(int lane = 0) const;

  LoadCounts load() const;
  WireCounts wire_counts() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ferry
