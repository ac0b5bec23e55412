// The sender role of combine: sends this rank's expert rows, or their sum for each token, to the staging of
// the tokens' source ranks. Work is divided by messages: a message is a token that this rank received.
#pragma once

#include "backends/cuda/combine/ll_rows.cuh"
#include "backends/cuda/operations/route_values.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/flag_publisher.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/peer_messages.cuh"
#include "backends/cuda/protocol/plan_entries.cuh"
#include "backends/cuda/protocol/wait.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kCombineWarps = 11;                          // of a block that move rows
inline constexpr int kCombineThreads = 32 * (kCombineWarps + 1);  // the last warp publishes flags

// The expert rows of one token on this rank; thread k stands for slot k.
struct TokenRows {
  std::int32_t row;           // of this thread's slot, or -1
  std::uint32_t row_threads;  // threads with a row, one bit each
  float weight;               // of this thread's row
};

// [warp] `row`: of this thread's slot as the plan has it, not yet checked; `index`: of that entry in the
// plan.
__device__ inline TokenRows rows_of_token(const CombineArguments& call, std::int32_t row, std::int64_t total,
                                          std::int64_t index) {
  TokenRows rows{row, 0, 1.0f};
  if (row != -1 && !valid_entry(call.lane, row, total, index)) rows.row = -1;
  rows.row_threads = __ballot_sync(~0u, rows.row >= 0);
  // rank_major: a token has one row here, which all its slots name; keep the first.
  if (call.lane.layout == Layout::rank_major) rows.row_threads &= ~rows.row_threads + 1;
  if (rows.row >= 0 && call.row_weights != nullptr) rows.weight = call.row_weights[rows.row];
  return rows;
}

__device__ __forceinline__ const std::byte* output_row(const CombineArguments& call, std::int32_t row) {
  return call.outputs + row * call.output_stride;
}

__device__ __forceinline__ bool is_among(std::uint32_t threads) {
  return (threads >> threadIdx.x % 32 & 1) != 0;
}

// [warp] Waits for the weight of this thread's slot in message i of `source`, which the source rank sends in
// this call (send_weights). False: the call was aborted.
__device__ __forceinline__ bool await_weight(const CombineArguments& call, std::uint64_t number, int source,
                                             std::int32_t i, float* weight) {
  const LaneView& lane = call.lane;
  const WaitResult result =
      await_route_value(lane, Payload::weights, {Operation::combine, number, source}, i, weight);
  if (result == WaitResult::aborted) return false;
  if (result == WaitResult::ready) return true;
  if (threadIdx.x % 32 == 0) record_bad_source(lane, std::int64_t{source} * lane.max_tokens + i);
  *weight = 0;
  return true;
}

// Counts the rows and bytes that one warp has sent to other ranks, for Exchange::wire_counts().
struct CombineTraffic {
  unsigned long long rows = 0, bytes = 0;

  __device__ void publish(const LaneView& lane) const {
    if (rows == 0) return;
    add_wire(&lane.state->wire.combine_messages, rows);
    add_wire(&lane.state->wire.combine_bytes, bytes);
  }
};

// A message of dispatch whose rows are to be returned, as the plan has it.
struct ReceivedMessage {
  std::int32_t source;    // rank of the token, or -1: no message is left
  std::int32_t i;         // index among the messages from `source`
  std::int32_t slice;     // of the row, for this warp
  std::int32_t token;     // at `source`
  std::int32_t position;  // of this rank in the token's list of ranks
  std::int32_t row;       // here, of this thread's slot
};

// The part of a message that this warp sends.
struct ReturnedRows {
  int destination;          // source rank of the token
  std::int64_t first_row;   // of the token in the destination's staging
  std::int64_t packed_row;  // packed: the message's first row in the outbox
  TokenRows rows;
  Quarters quarters;  // of each row
  bool as_packets;    // in LL packets instead of staging and flags
  bool in_both;       // in LL packets, and in staging with flags
};

// One sender warp. It takes every `stride`-th work item and reads the plan's entries of the next message
// while it sends the current one.
template <class Traits, DType kIn>
struct CombineSender {
  const CombineArguments& call;
  const PlanView& plan;
  FlagPublisher<kCombineWarps>* publisher;
  std::byte* memory;  // SumStream::kBytes of shared memory
  std::uint64_t number;
  std::int32_t total;          // rows on this rank
  PeerMessages messages;       // from each rank
  std::int32_t packed_before;  // packed, narrow: rows in the outbox before those for the rank with this
                               // thread's number
  int splits;                  // 1 << splits warps share a row
  int item, stride, items;     // a work item is a slice of a message; `item` is the next one
  ReceivedMessage next_message;
  CombineTraffic traffic;

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }

  // `received`: messages from the rank with this thread's number, as the plan has it.
  __device__ CombineSender(const CombineArguments& arguments, std::uint64_t call_number, int worker,
                           int workers, std::int32_t received, FlagPublisher<kCombineWarps>* block_publisher,
                           std::byte* stream_memory)
      : call(arguments),
        plan(arguments.plan),
        publisher(block_publisher),
        memory(stream_memory),
        number(call_number),
        total(static_cast<std::int32_t>(plan.header->total)),
        item(worker),
        stride(workers) {
    const LaneView& lane = call.lane;
    const bool is_destination = slot() < lane.ranks && (call.own_staged || slot() != lane.rank);
    if constexpr (kWide) {
      messages = {
          .lane = &lane, .tokens_between = plan.tokens_between, .sent = false, .own = call.own_staged};
    } else {
      messages.mine = is_destination ? usable_messages(lane, received, slot(), lane.rank) : 0;
    }
    splits = log2_segments_for(messages.sum(), workers);
    items = messages.most() * destinations() << splits;
    packed_before = !kWide && packs<Traits>(call) ? rows_before(slot()) : 0;
    next_message = read_next();
  }

  // Packed: rows in the outbox before those for a rank.
  __device__ std::int32_t rows_before(int destination) const {
    std::int32_t before = 0;
    for (int rank = 0; rank < call.lane.ranks; ++rank)
      if (rank < destination) before += call.packed.rows[rank];
    return before;
  }

  __device__ int destinations() const { return call.own_staged ? call.lane.ranks : call.lane.ranks - 1; }

  // Destinations in turn, starting with the rank after this one, so that all links are in use at once.
  __device__ ReceivedMessage read_next() {
    const LaneView& lane = call.lane;
#pragma unroll 1
    for (; item < items; item += stride) {
      const int message_number = item >> splits;
      const Divisor by = call.own_staged ? lane.by_ranks : lane.by_others;
      const std::int32_t i = by.quotient(message_number);
      const int next = lane.rank + 1 + message_number - i * by.divisor;
      const int source = next < lane.ranks ? next : next - lane.ranks;
      if (i >= messages.of(source)) continue;
      const int slice = item - (message_number << splits);
      item += stride;
      const std::int64_t message = std::int64_t{source} * lane.max_tokens + i;
      return {source,
              i,
              slice,
              plan.received_token[message],
              plan.received_position[message],
              slot() < lane.top_k ? plan.received_rows_of_message[message * lane.top_k + slot()] : -1};
    }
    return {-1, 0, 0, 0, 0, 0};
  }

  __device__ bool partial() const { return reduction_of<Traits>(call) == Reduction::partial; }
  __device__ DType combine_type() const { return Traits::kSpecialised ? kIn : call.combine_type; }
  __device__ bool has_values() const { return !Traits::kSpecialised && call.row_values != nullptr; }
  // Where every token goes to every rank, a token without rows here returns +0 for each of them. The caller
  // then need not pass row_values, so this rank does not know whether their source ranks await packets.
  __device__ bool has_no_rows() const {
    if constexpr (Traits::kToEveryRank) return total == 0;
    return false;
  }

  // The next message. False: none is left, or the call was aborted.
  __device__ bool next(ReturnedRows* out) {
    const LaneView& lane = call.lane;
    while (next_message.source >= 0) {
      const ReceivedMessage received = next_message;
      next_message = read_next();
      const std::int64_t message = std::int64_t{received.source} * lane.max_tokens + received.i;
      if (received.token < 0 || received.token >= lane.max_tokens || received.position < 0 ||
          received.position >= lane.most_ranks) {
        if (slot() == 0 && received.slice == 0) record_bad_source(lane, message);
        continue;
      }
      TokenRows rows = rows_of_token(call, received.row, total, message * lane.top_k + slot());
      if (weights_travel<Traits>(call) &&
          !await_weight(call, number, received.source, received.i, &rows.weight))
        return false;
      const std::int64_t first = partial()
                                     ? std::int64_t{received.token} * lane.most_ranks + received.position
                                     : std::int64_t{received.token} * lane.top_k;
      const bool as_packets = partial() && !has_values() && !packs<Traits>(call) &&
                              returns_as_packets(lane, messages.of(received.source), received.token);
      std::int64_t packed = 0;
      if (packs<Traits>(call))
        packed = (kWide ? rows_before(received.source) : __shfl_sync(~0u, packed_before, received.source)) +
                 call.packed.first_row[message];
      // A damaged plan may return more rows than there can be.
      const int packed_rows = partial() ? 1 : __popc(static_cast<int>(rows.row_threads));
      if (packs<Traits>(call) && packed + packed_rows > call.packed.most_rows) {
        if (slot() == 0 && received.slice == 0) record_bad_source(lane, message);
        continue;
      }
      *out = {received.source,
              first,
              packed,
              rows,
              Quarters::of(received.slice, splits),
              as_packets,
              as_packets && has_no_rows()};
      return true;
    }
    return false;
  }

  // The row of a token's sum, or of its slot `row`.
  __device__ std::byte* packed_row(const ReturnedRows& to, int row) const {
    const std::uint32_t before = partial() ? 0 : to.rows.row_threads & ((1u << row) - 1);
    return call.packed.outbox + (to.packed_row + __popc(static_cast<int>(before))) * call.packed.row_bytes;
  }
  __device__ std::byte* staged_row(const ReturnedRows& to, int row) const {
    if (packs<Traits>(call)) return packed_row(to, row);
    return memory::combine_row(call.lane, to.destination, static_cast<int>(number & 1), to.first_row + row);
  }

  __device__ std::byte* ll_row(const ReturnedRows& to) const {
    return memory::ll_row(call.lane, to.destination, static_cast<int>(number & 1),
                          static_cast<std::int32_t>(to.first_row));
  }

  // Writes the weights and values beside the rows, and the labels of packed rows.
  __device__ void write_tails(const ReturnedRows& to) const {
    if (packs<Traits>(call) && (partial() ? slot() == 0 : is_among(to.rows.row_threads)))
      *reinterpret_cast<std::uint64_t*>(packed_row(to, slot()) + call.packed.label_offset) =
          packed_label(number, to.first_row + (partial() ? 0 : slot()));
    const float value = has_values() && to.rows.row >= 0 ? call.row_values[to.rows.row] : 0.0f;
    if (!partial()) {
      if (is_among(to.rows.row_threads))
        *reinterpret_cast<RouteTail*>(staged_row(to, slot()) + call.row.tail_offset) =
            RouteTail{to.rows.weight, value};
    } else if (has_values() && slot() < call.lane.top_k) {
      reinterpret_cast<float*>(staged_row(to, 0) + call.row.tail_offset)[slot()] = value;
    }
  }

  // Sends the rows themselves, or their sum.
  __device__ void send_rows(const ReturnedRows& to) const {
    const Columns columns = columns_of(to.quarters, call.lane.hidden);
    const std::byte* row = to.rows.row >= 0 ? output_row(call, to.rows.row) : nullptr;
    SumStream stream = open_sum_stream(memory, columns, value_bytes(kIn), row, to.rows.row_threads);
#pragma unroll 1
    for (int first = columns.begin; first < columns.end; first += PieceColumns<kIn>::kColumns) {
      if (!partial()) {
        for_each_piece(stream, to.rows.row_threads, [&](const LoadedPiece& piece, int k) {
          store_piece<kIn>(piece, combine_type(), staged_row(to, k), first, columns.end);
        });
        continue;
      }
      if constexpr (Traits::kSpecialised) {
        const PackedPiece sum = weighted_sum<kIn>(stream, to.rows.row_threads, to.rows.weight);
        if (to.as_packets) {
          store_piece_packets<kIn>(sum, ll_row(to), first, columns.end, number);
        } else {
          store_piece<kIn>(sum, kIn, staged_row(to, 0), first, columns.end);
        }
      } else {
        PieceSums<kIn> sum = {};
        add_weighted<kIn>(stream, to.rows.row_threads, to.rows.weight, combine_type(), sum);
        if (to.as_packets) {
          store_sum_packets<kIn>(combine_type(), ll_row(to), first, columns.end, sum, number);
        } else {
          store_sums<kIn>(combine_type(), staged_row(to, 0), first, columns.end, sum);
        }
      }
    }
  }

  // Stores +0 in staging.
  __device__ void send_zeros(const ReturnedRows& to) const {
    const Columns columns = columns_of(to.quarters, call.lane.hidden);
    const int width = static_cast<int>(value_bytes(combine_type()));
    std::byte* const row = staged_row(to, 0);
    for (int at = columns.begin * width + 16 * slot(); at < columns.end * width; at += 512)
      *reinterpret_cast<uint4*>(row + at) = make_uint4(0, 0, 0, 0);
  }

  __device__ void send(const ReturnedRows& to) {
    const LaneView& lane = call.lane;
    inject_fault(lane, KernelPoint::row);
    if (to.quarters.first == 0) write_tails(to);
    send_rows(to);
    if constexpr (Traits::kToEveryRank) {
      if (to.in_both) send_zeros(to);
    }
    // Packed rows are read by later kernels.
    if ((!to.as_packets || to.in_both) && !packs<Traits>(call)) publish_flags(to);
    if (to.destination == lane.rank || to.quarters.first != 0) return;
    const unsigned long long values = call.row.tail_offset;
    const unsigned rows =
        partial() ? 1 : static_cast<unsigned>(__popc(static_cast<int>(to.rows.row_threads)));
    const unsigned long long tail = !partial() ? sizeof(RouteTail) : has_values() ? 4 * lane.top_k : 0;
    traffic.rows += rows;
    traffic.bytes += rows * (values + tail);
  }

  __device__ void publish_flags(const ReturnedRows& to) const {
    const LaneView& lane = call.lane;
    // Each thread sets the flags of its slot's row, or the first thread those of the token's sum.
    const bool wants = partial() ? slot() == 0 : is_among(to.rows.row_threads);
    Flag* flags = memory::combine_flags(lane, to.destination, static_cast<int>(number & 1),
                                        to.first_row + (partial() ? 0 : slot()));
    if (next_message.source >= 0) {
      publisher->enqueue(wants, flags + to.quarters.first, to.quarters.count());
    } else {
      // This is the warp's last message: it only has to wait for its stores, so it sets the flags itself. The
      // barrier orders all threads' stores before the fence.
      __syncwarp();
      inject_fault(lane, KernelPoint::flag);
      if (wants) publish_now(flags + to.quarters.first, to.quarters.count(), number);
    }
  }

  __device__ void send_all() {
    for (ReturnedRows to; next(&to);) send(to);
    publisher->close();
    if (slot() == 0) traffic.publish(call.lane);
  }
};

// [warp] Worker `worker` of `workers`. `received`: messages from the rank with this thread's number, as the
// plan has it. `memory`: SumStream::kBytes of shared memory.
template <class Traits>
__device__ __forceinline__ void send_results(const CombineArguments& call, std::uint64_t number, int worker,
                                             int workers, std::int32_t received,
                                             FlagPublisher<kCombineWarps>* publisher, std::byte* memory) {
  with_type<Traits>(call.output_type, [&](auto type) {
    CombineSender<Traits, type.value>(call, number, worker, workers, received, publisher, memory).send_all();
  });
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
