// The sending role of combine: this rank's rows, or their sums, go to the home ranks' staging.
#pragma once

#include "cuda/combine.hpp"
#include "cuda/findings.cuh"
#include "cuda/places.cuh"
#include "cuda/route_values.cuh"
#include "cuda/row_stream.cuh"
#include "cuda/values.cuh"
#include "cuda/wait.cuh"

namespace ferry::cuda {

inline constexpr int kAccessesOfPiece = kPieceBytes / 16;
inline constexpr int kDeep = kAccessesOfPiece / 32;  // accesses of a piece by each thread

// The experts' rows of one token on this rank: this thread's slot has row `row` (-1: none), `kept` are the
// slots that have one.
struct TokenRows {
  std::int32_t row;
  std::uint32_t kept;
  float weight;
};

// By one warp. `row`: of this thread's slot, unchecked; `where`: its place in the plan.
__device__ inline TokenRows rows_of_token(const CombineArguments& call, std::int32_t row, std::int64_t total,
                                          std::int64_t where) {
  TokenRows rows{row, 0, 1.0f};
  if (row != -1 && !usable(call.lane, row, total, where)) rows.row = -1;
  rows.kept = __ballot_sync(~0u, rows.row >= 0);
  // Every slot of a rank_major token names its one row.
  if (call.lane.layout == Layout::rank_major) rows.kept &= ~rows.kept + 1;
  if (rows.row >= 0 && call.weights != nullptr) rows.weight = call.weights[rows.row];
  return rows;
}

__device__ __forceinline__ const std::byte* output_row(const CombineArguments& call, std::int32_t row) {
  return call.outputs + row * call.output_stride;
}

// This thread's place among those of the warp that are in `threads`, if it is.
__device__ __forceinline__ int place_among(std::uint32_t threads) {
  return __popc(static_cast<int>(threads & ((1u << threadIdx.x % 32) - 1)));
}

__device__ __forceinline__ bool is_among(std::uint32_t threads) {
  return (threads >> threadIdx.x % 32 & 1) != 0;
}

// sum = fma(weight, v, sum) over the stream's next pieces, those of the slots in `kept`; `weight`: of this
// thread's slot. `left`: accesses from the piece's first to the end of the row. v is rounded to the wire
// type.
template <DType kIn>
__device__ __forceinline__ void add_pieces(RowStream& stream, std::uint32_t kept, float weight, DType wire,
                                           int left, float (&sum)[kDeep][kPerAccess<kIn>]) {
  const int thread = static_cast<int>(threadIdx.x % 32);
  for (; kept != 0; kept &= kept - 1) {
    const float w = __shfl_sync(~0u, weight, __ffs(static_cast<int>(kept)) - 1);
    const uint4* piece = stream.await_piece();
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int at = thread + 32 * d;
      if (at >= left) continue;
      float value[kPerAccess<kIn>];
      unpack<kIn>(piece[at], value);
#pragma unroll
      for (int i = 0; i < kPerAccess<kIn>; ++i) {
        const float v = kIn == wire ? value[i] : rounded(wire, value[i]);
        sum[d][i] = __fmaf_rn(w, v, sum[d][i]);
      }
    }
    stream.release_piece();
  }
}

// By one warp: sums of a piece's columns to row `to`, whose accesses (of kIn) from `first` on they are.
template <DType kIn>
__device__ __forceinline__ void store_sums(DType type, std::byte* to, std::int64_t first, int left,
                                           const float (&sum)[kDeep][kPerAccess<kIn>]) {
  const int thread = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    const int at = thread + 32 * d;
    if (at < left) store_values(type, to, (first + at) * kPerAccess<kIn>, sum[d]);
  }
}

// By one warp: the stream's next piece to row `to` of type `type`; moved if it has it.
template <DType kIn>
__device__ void copy_piece(RowStream& stream, DType type, std::byte* to, std::int64_t first, int left) {
  const uint4* piece = stream.await_piece();
  const int thread = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    const int at = thread + 32 * d;
    if (at >= left) continue;
    const uint4 raw = piece[at];
    if (type == kIn) {
      reinterpret_cast<uint4*>(to)[first + at] = raw;
      continue;
    }
    float value[kPerAccess<kIn>];
    unpack<kIn>(raw, value);
    store_values(type, to, (first + at) * kPerAccess<kIn>, value);
  }
  stream.release_piece();
}

// By one warp: the weight of this thread's slot for message i of `home`, which its home has sent in this
// call. False: the call has ended early.
__device__ inline bool await_weight(const CombineArguments& call, std::uint64_t number, int home,
                                    std::int64_t i, float* weight) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32, generation = static_cast<int>(number & 1);
  const Came came = wait_together(lane, lane.dispatch_flag(lane.rank, generation, home, i),
                                  lane.sent_flag(Phase::weights, lane.rank, generation, home),
                                  {Operation::combine, number, home});
  if (came == Came::ended) return false;
  if (came == Came::no) {
    if (slot == 0) note_bad_source(lane, std::int64_t{home} * lane.max_tokens + i);
    *weight = 0;
    return true;
  }
  const std::byte* values = lane.message(lane.rank, generation, home, i, values_bytes(lane));
  if (slot < lane.top_k) *weight = reinterpret_cast<const float*>(values)[slot];
  return true;
}

struct CombineSent {
  unsigned long long rows = 0, bytes = 0;

  __device__ void publish(const LaneView& lane) const {
    if (rows == 0) return;
    add_wire(&lane.state->wire.combine_messages, rows);
    add_wire(&lane.state->wire.combine_bytes, bytes);
  }
};

// A message that came here and whose rows go back, as the plan has it. `home` -1: none is left.
struct CameMessage {
  std::int32_t home, i, token, position, row;  // row: of this thread's slot
};

// What goes back to a home: rows of staging from `first_row` on.
struct Outgoing {
  std::int64_t first_row;
  int home;
  std::uint32_t kept;
  float weight;
};

// One warp of those that send. Its messages are `step` apart; what the plan says of each is read while those
// before it move.
template <DType kIn>
struct ResultSender {
  const CombineArguments& call;
  const PlanView& plan;
  RowStream& stream;
  std::uint64_t number;
  std::int32_t total;              // rows here
  std::int32_t messages;           // from the rank that is this thread's
  std::int32_t unit, step, units;  // unit: home and i of the message to look up next
  CameMessage ahead;
  CombineSent sent;

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }

  __device__ ResultSender(const CombineArguments& arguments, std::uint64_t call_number, int worker,
                          int workers, const PlanView& of, RowStream& rows)
      : call(arguments),
        plan(of),
        stream(rows),
        number(call_number),
        total(static_cast<std::int32_t>(of.header->total)),
        unit(worker),
        step(workers) {
    const LaneView& lane = call.lane;
    messages =
        slot() < lane.ranks ? static_cast<std::int32_t>(messages_between(lane, plan, slot(), lane.rank)) : 0;
    units = __reduce_max_sync(~0u, messages) * homes();
    ahead = look_up();
  }

  __device__ int homes() const { return call.own_staged ? call.lane.ranks : call.lane.ranks - 1; }

  // Homes in turn, starting with the next rank.
  __device__ CameMessage look_up() {
    const LaneView& lane = call.lane;
    for (; unit < units; unit += step) {
      const int home = static_cast<int>((lane.rank + 1 + unit % homes()) % lane.ranks);
      const std::int32_t i = unit / homes();
      if (i >= __shfl_sync(~0u, messages, home)) continue;
      unit += step;
      const std::int64_t message = std::int64_t{home} * lane.max_tokens + i;
      return {home, i, plan.came_token[message], plan.came_position[message],
              slot() < lane.top_k ? plan.came_rows[message * lane.top_k + slot()] : -1};
    }
    return {-1, 0, 0, 0, 0};
  }

  // The next message's rows are on their way. False: none is left, or the call has ended early.
  __device__ bool start(Outgoing* next) {
    const LaneView& lane = call.lane;
    while (ahead.home >= 0) {
      const CameMessage came = ahead;
      ahead = look_up();
      const std::int64_t message = std::int64_t{came.home} * lane.max_tokens + came.i;
      if (came.token < 0 || came.token >= lane.max_tokens || came.position < 0 ||
          came.position >= lane.most_ranks) {
        if (slot() == 0) note_bad_source(lane, message);
        continue;
      }
      TokenRows rows = rows_of_token(call, came.row, total, message * lane.top_k + slot());
      // Before rows are on their way: a block must not end while any are.
      if (call.weights_travel && !await_weight(call, number, came.home, came.i, &rows.weight)) return false;
      if (call.outputs != nullptr) {
        if (is_among(rows.kept)) stream.rows_to_queue()[place_among(rows.kept)] = output_row(call, rows.row);
        stream.queue(__popc(static_cast<int>(rows.kept)));
      }
      const bool partial = call.reduction == Reduction::partial;
      const std::int64_t first = partial ? std::int64_t{came.token} * lane.most_ranks + came.position
                                         : std::int64_t{came.token} * lane.top_k;
      *next = {first, came.home, rows.kept, rows.weight};
      write_tails(*next, rows, partial);
      return true;
    }
    return false;
  }

  __device__ std::byte* row_at_home(const Outgoing& to, int row) const {
    return call.lane.combine_row(to.home, static_cast<int>(number & 1), to.first_row + row);
  }

  __device__ void write_tails(const Outgoing& to, const TokenRows& rows, bool partial) const {
    const float value = call.row_values != nullptr && rows.row >= 0 ? call.row_values[rows.row] : 0.0f;
    if (!partial) {
      if (is_among(rows.kept))
        *reinterpret_cast<RouteTail*>(row_at_home(to, slot()) + call.row.tail_offset) =
            RouteTail{rows.weight, value};
    } else if (call.row_values != nullptr && slot() < call.lane.top_k) {
      reinterpret_cast<float*>(row_at_home(to, 0) + call.row.tail_offset)[slot()] = value;
    }
  }

  __device__ void move_rows(const Outgoing& to) {
    constexpr int kValues = kPerAccess<kIn>;
    const int accesses = call.lane.hidden / kValues;
    for (int first = 0; first < accesses; first += kAccessesOfPiece) {
      if (call.reduction != Reduction::partial) {
        for (std::uint32_t left = to.kept; left != 0; left &= left - 1)
          copy_piece<kIn>(stream, call.wire, row_at_home(to, __ffs(static_cast<int>(left)) - 1), first,
                          accesses - first);
        continue;
      }
      float sum[kDeep][kValues] = {};
      add_pieces<kIn>(stream, to.kept, to.weight, call.wire, accesses - first, sum);
      store_sums<kIn>(call.wire, row_at_home(to, 0), first, accesses - first, sum);
    }
  }

  __device__ void send(const Outgoing& to) {
    const LaneView& lane = call.lane;
    const bool partial = call.reduction == Reduction::partial;
    jitter(lane);
    if (call.outputs != nullptr) move_rows(to);
    __syncwarp();
    jitter(lane);
    // Release: what all threads of the warp have stored (ordered by the barrier) before the flags of the
    // rows. Each thread announces its slot's row, or the first the token's sum.
    if (partial ? slot() == 0 : is_among(to.kept)) {
      store_release_sys(
          lane.combine_flag(to.home, static_cast<int>(number & 1), to.first_row + (partial ? 0 : slot())),
          number);
    }
    if (to.home == lane.rank) return;
    const unsigned long long values = call.outputs != nullptr ? call.row.tail_offset : 0;
    const unsigned rows = partial ? 1 : static_cast<unsigned>(__popc(static_cast<int>(to.kept)));
    const unsigned long long tail = !partial                     ? sizeof(RouteTail)
                                    : call.row_values != nullptr ? 4 * lane.top_k
                                                                 : 0;
    sent.rows += rows;
    sent.bytes += rows * (values + tail);
  }

  __device__ void send_all() {
    Outgoing next{};
    for (bool more = start(&next); more;) {
      const Outgoing now = next;
      more = start(&next);
      send(now);
    }
    if (slot() == 0) sent.publish(call.lane);
  }
};

// By one warp of `workers`.
__device__ __forceinline__ void send_results(const CombineArguments& call, std::uint64_t number, int worker,
                                             int workers, const PlanView& plan, RowStream& stream) {
  stream.set_row_bytes(call.lane.hidden * value_bytes(call.output_type));
  switch (call.output_type) {
    case DType::bf16:
      return ResultSender<DType::bf16>(call, number, worker, workers, plan, stream).send_all();
    case DType::fp16:
      return ResultSender<DType::fp16>(call, number, worker, workers, plan, stream).send_all();
    case DType::fp32:
      return ResultSender<DType::fp32>(call, number, worker, workers, plan, stream).send_all();
  }
}

}  // namespace ferry::cuda
