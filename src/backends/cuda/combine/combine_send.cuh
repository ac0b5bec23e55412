// The sending role of combine: this rank's rows, or their sums, go to the home ranks' staging.
#pragma once

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/combine/route_values.cuh"
#include "backends/cuda/combine/row_sums.cuh"
#include "backends/cuda/device/kernel_traits.cuh"
#include "backends/cuda/device/ll_rows.cuh"
#include "backends/cuda/dispatch/row_offsets.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/flag_publisher.cuh"
#include "backends/cuda/protocol/wait.cuh"

namespace ferry::cuda {

inline constexpr int kCombineWarps = 11;                          // of a block, that move rows
inline constexpr int kCombineThreads = 32 * (kCombineWarps + 1);  // and one warp that announces

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

__device__ __forceinline__ bool is_among(std::uint32_t threads) {
  return (threads >> threadIdx.x % 32 & 1) != 0;
}

// By one warp: the weight of this thread's slot for message i of `home`, which its home has sent in this
// call. False: the call has ended early.
__device__ __forceinline__ bool await_weight(const CombineArguments& call, std::uint64_t number, int home,
                                             std::int32_t i, float* weight) {
  const LaneView& lane = call.lane;
  const WaitResult came = await_value(lane, Payload::weights, {Operation::combine, number, home}, i, weight);
  if (came == WaitResult::ended) return false;
  if (came == WaitResult::yes) return true;
  if (threadIdx.x % 32 == 0) record_bad_source(lane, std::int64_t{home} * lane.max_tokens + i);
  *weight = 0;
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
  std::int32_t home, i, share, token, position, row;  // row: of this thread's slot
};

// What goes back to a home: rows of staging from `first_row` on; quarters of each.
struct Outgoing {
  std::int64_t first_row;
  int home;
  TokenRows rows;
  Quarters quarters;
  bool as_packets;
};

// One warp of those that send. Its messages are `step` apart; what the plan
// says of the next is read while one moves.
template <class Traits, DType kIn>
struct ResultSender {
  const CombineArguments& call;
  const PlanView& plan;
  FlagPublisher<kCombineWarps>* publisher;
  std::byte* memory;  // of a stream
  std::uint64_t number;
  std::int32_t total;     // rows here
  std::int32_t messages;  // from the rank that is this thread's
  int splits;             // a message is shared by 1 << splits warps
  int unit, step, units;  // unit: share, home and i of the message to look up next
  CameMessage ahead;
  CombineSent sent;

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }

  // `came`: messages from the rank that is this thread's, as the plan has it.
  __device__ ResultSender(const CombineArguments& arguments, std::uint64_t call_number, int worker,
                          int workers, std::int32_t came, FlagPublisher<kCombineWarps>* block_publisher,
                          std::byte* stream_memory)
      : call(arguments),
        plan(arguments.plan),
        publisher(block_publisher),
        memory(stream_memory),
        number(call_number),
        total(static_cast<std::int32_t>(plan.header->total)),
        unit(worker),
        step(workers) {
    const LaneView& lane = call.lane;
    const bool is_home = slot() < lane.ranks && (call.own_staged || slot() != lane.rank);
    messages = is_home ? usable_messages(lane, came, slot(), lane.rank) : 0;
    splits = splits_of(__reduce_add_sync(~0u, messages), workers);
    units = __reduce_max_sync(~0u, messages) * homes() << splits;
    ahead = look_up();
  }

  __device__ int homes() const { return call.own_staged ? call.lane.ranks : call.lane.ranks - 1; }

  // Homes in turn, starting with the next rank.
  __device__ CameMessage look_up() {
    const LaneView& lane = call.lane;
#pragma unroll 1
    for (; unit < units; unit += step) {
      const int turn = unit >> splits;
      const Divisor by = call.own_staged ? lane.by_ranks : lane.by_others;
      const std::int32_t i = by.quotient(turn);
      const int next = lane.rank + 1 + turn - i * by.divisor;
      const int home = next < lane.ranks ? next : next - lane.ranks;
      if (i >= __shfl_sync(~0u, messages, home)) continue;
      const int share = unit - (turn << splits);
      unit += step;
      const std::int64_t message = std::int64_t{home} * lane.max_tokens + i;
      return {home,
              i,
              share,
              plan.came_token[message],
              plan.came_position[message],
              slot() < lane.top_k ? plan.came_rows[message * lane.top_k + slot()] : -1};
    }
    return {-1, 0, 0, 0, 0, 0};
  }

  __device__ bool partial() const { return reduction_of<Traits>(call) == Reduction::partial; }
  __device__ DType wire() const { return Traits::kSpecialised ? kIn : call.wire; }
  __device__ bool has_values() const { return !Traits::kSpecialised && call.row_values != nullptr; }

  // The next message. False: none is left, or the call has ended early.
  __device__ bool next(Outgoing* out) {
    const LaneView& lane = call.lane;
    while (ahead.home >= 0) {
      const CameMessage came = ahead;
      ahead = look_up();
      const std::int64_t message = std::int64_t{came.home} * lane.max_tokens + came.i;
      if (came.token < 0 || came.token >= lane.max_tokens || came.position < 0 ||
          came.position >= lane.most_ranks) {
        if (slot() == 0 && came.share == 0) record_bad_source(lane, message);
        continue;
      }
      TokenRows rows = rows_of_token(call, came.row, total, message * lane.top_k + slot());
      if (weights_travel<Traits>(call) && !await_weight(call, number, came.home, came.i, &rows.weight))
        return false;
      const std::int64_t first = partial() ? std::int64_t{came.token} * lane.most_ranks + came.position
                                           : std::int64_t{came.token} * lane.top_k;
      const bool as_packets = partial() && call.outputs != nullptr && !has_values() &&
                              goes_as_packets(lane, __shfl_sync(~0u, messages, came.home), came.token);
      *out = {first, came.home, rows, Quarters::of(came.share, splits), as_packets};
      return true;
    }
    return false;
  }

  __device__ std::byte* row_at_home(const Outgoing& to, int row) const {
    return call.lane.combine_row(to.home, static_cast<int>(number & 1), to.first_row + row);
  }

  __device__ std::byte* units_at_home(const Outgoing& to) const {
    return call.lane.unit_row(to.home, static_cast<int>(number & 1), static_cast<std::int32_t>(to.first_row));
  }

  __device__ void write_tails(const Outgoing& to) const {
    const float value = has_values() && to.rows.row >= 0 ? call.row_values[to.rows.row] : 0.0f;
    if (!partial()) {
      if (is_among(to.rows.kept))
        *reinterpret_cast<RouteTail*>(row_at_home(to, slot()) + call.row.tail_offset) =
            RouteTail{to.rows.weight, value};
    } else if (has_values() && slot() < call.lane.top_k) {
      reinterpret_cast<float*>(row_at_home(to, 0) + call.row.tail_offset)[slot()] = value;
    }
  }

  __device__ void move_rows(const Outgoing& to) const {
    const Columns columns = columns_of(to.quarters, call.lane.hidden);
    const std::byte* row = to.rows.row >= 0 ? output_row(call, to.rows.row) : nullptr;
    SumStream stream = stream_of(memory, columns, value_bytes(kIn), row, to.rows.kept);
#pragma unroll 1
    for (int first = columns.begin; first < columns.end; first += PieceColumns<kIn>::kColumns) {
      if (!partial()) {
        each_piece(stream, to.rows.kept, [&](const LoadedPiece& piece, int of) {
          store_piece<kIn>(piece, wire(), row_at_home(to, of), first, columns.end);
        });
        continue;
      }
      if constexpr (Traits::kSpecialised) {
        const PackedPiece sum = sum_weighed<kIn>(stream, to.rows.kept, to.rows.weight);
        if (to.as_packets) {
          store_piece_units<kIn>(sum, units_at_home(to), first, columns.end, number);
        } else {
          store_piece<kIn>(sum, kIn, row_at_home(to, 0), first, columns.end);
        }
      } else {
        Sums<kIn> sum = {};
        add_weighed<kIn>(stream, to.rows.kept, to.rows.weight, wire(), sum);
        if (to.as_packets) {
          store_sum_units<kIn>(wire(), units_at_home(to), first, columns.end, sum, number);
        } else {
          store_sums<kIn>(wire(), row_at_home(to, 0), first, columns.end, sum);
        }
      }
    }
  }

  __device__ void send(const Outgoing& to) {
    const LaneView& lane = call.lane;
    inject_fault(lane, Point::row);
    if (to.quarters.first == 0) write_tails(to);
    if (call.outputs != nullptr) move_rows(to);
    if (!to.as_packets) announce(to);
    if (to.home == lane.rank || to.quarters.first != 0) return;
    const unsigned long long values = call.outputs != nullptr ? call.row.tail_offset : 0;
    const unsigned rows = partial() ? 1 : static_cast<unsigned>(__popc(static_cast<int>(to.rows.kept)));
    const unsigned long long tail = !partial() ? sizeof(RouteTail) : has_values() ? 4 * lane.top_k : 0;
    sent.rows += rows;
    sent.bytes += rows * (values + tail);
  }

  __device__ void announce(const Outgoing& to) const {
    const LaneView& lane = call.lane;
    // Each thread asks for its slot's row, or the first for the token's sum.
    const bool asks = partial() ? slot() == 0 : is_among(to.rows.kept);
    std::uint64_t* flags =
        lane.combine_flags(to.home, static_cast<int>(number & 1), to.first_row + (partial() ? 0 : slot()));
    if (ahead.home >= 0) {
      publisher->ask(asks, flags + to.quarters.first, to.quarters.count());
    } else {
      // Nothing else to do than to wait for its stores. All threads' before the fence, by the barrier.
      __syncwarp();
      inject_fault(lane, Point::flag);
      if (asks) publish_now(flags + to.quarters.first, to.quarters.count(), number);
    }
  }

  __device__ void send_all() {
    for (Outgoing to; next(&to);) send(to);
    publisher->close();
    if (slot() == 0) sent.publish(call.lane);
  }
};

// By one warp of `workers`. `came`: as ResultSender; `memory`: of its streams.
template <class Traits>
__device__ __forceinline__ void send_results(const CombineArguments& call, std::uint64_t number, int worker,
                                             int workers, std::int32_t came,
                                             FlagPublisher<kCombineWarps>* publisher, std::byte* memory) {
  with_type<Traits>(call.output_type, [&](auto type) {
    ResultSender<Traits, type.value>(call, number, worker, workers, came, publisher, memory).send_all();
  });
}

}  // namespace ferry::cuda
