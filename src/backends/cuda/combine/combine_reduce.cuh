// The reducer role of combine: on the tokens' source rank, adds each token's rows or partial sums and stores
// the result.
//
// How a token is reduced:
//   partial    every rank has summed its own rows of the token (combine_send.cuh); the sums are added in
//              ascending order of the ranks. This rank makes its own sum here, and rounds it like a sum
//              that was sent
//   exact      the rows themselves arrive and are added in ascending order of the slots, weights applied here
//   unreduced  the rows are stored unsummed, one for each slot
// Rows of shared experts are added last; they lie in this rank's memory.
// The order is fixed, so the result has the same bits in every run. Rows are awaited in staging by their
// flags, or, for few tokens, as LL packets.
#pragma once

#include "backends/cuda/combine/combine_send.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// A token's entries in the plan. Thread k reads those of slot k and of position k in the list of ranks.
struct TokenEntry {
  std::int32_t token;        // -1: no token is left
  std::int32_t slice;        // of the row, for this warp
  std::int32_t destination;  // rank of this thread's slot, or -1
  std::int32_t row;          // there, or -1
  std::int32_t rank;         // partial: at this thread's position in the token's list of ranks, or -1
};

// The locations of the terms of a token's sum: on this rank, and in staging (one row for each position, or
// for each slot).
struct TokenTerms {
  TokenRows own;
  std::uint32_t staged = 0;  // threads whose row in staging is awaited, later those whose row has arrived
};

// One reducer warp. It takes every `stride`-th work item and reads the plan's entries of the next token while
// it reduces the current one.
template <class Traits, DType kCombineType>
struct TokenReducer {
  const CombineArguments& call;
  const PlanView& plan;
  std::byte* memory;  // SumStream::kBytes of shared memory
  std::uint64_t number;
  std::int32_t tokens, total;
  PeerMessages sent_messages;  // how many the dispatch has sent to each rank
  int splits;                  // 1 << splits warps share a token
  int item, stride;            // a work item is a slice of a token; `item` is the next one
  TokenEntry next_token;

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }
  __device__ bool partial() const { return reduction_of<Traits>(call) == Reduction::partial; }
  __device__ DType result_type() const { return Traits::kSpecialised ? kCombineType : call.result_type; }
  __device__ int parity() const { return static_cast<int>(number & 1); }

  // `messages`: sent to the rank with this thread's number, as the plan has it.
  __device__ TokenReducer(const CombineArguments& arguments, std::uint64_t call_number, int worker,
                          int workers, std::int32_t messages, std::byte* stream_memory)
      : call(arguments),
        plan(arguments.plan),
        memory(stream_memory),
        number(call_number),
        tokens(plan.header->tokens),
        total(static_cast<std::int32_t>(plan.header->total)),
        sent_messages(messages_to_all(arguments, messages)),
        splits(log2_segments_for(plan.header->tokens, workers)),
        item(worker),
        stride(workers) {
    // Slices of one or two accesses: loads of several ranks' sums are then in flight at once.
    if (partial()) {
      while (splits >= kLog2Quarters && splits < kMaxSplits && tokens << (splits + 1) <= workers) ++splits;
    }
    next_token = read_next();
  }

  __device__ static PeerMessages messages_to_all(const CombineArguments& call, std::int32_t messages) {
    if constexpr (kWide)
      return {.lane = &call.lane, .tokens_between = call.plan.tokens_between, .sent = true};
    return {slot() < call.lane.ranks ? usable_messages(call.lane, messages, call.lane.rank, slot()) : 0};
  }

  __device__ TokenEntry read_next() {
    const LaneView& lane = call.lane;
    const std::int64_t token = item >> splits;
    if (token >= tokens) return {-1, 0, -1, -1, -1};
    const int slice = item - (static_cast<int>(token) << splits);
    item += stride;
    const std::int64_t route = token * lane.top_k + slot();
    const bool is_slot = slot() < lane.top_k, is_position = partial() && slot() < lane.most_ranks;
    return {static_cast<std::int32_t>(token), slice, is_slot ? plan.route_rank[route] : -1,
            is_slot ? plan.route_row[route] : -1,
            is_position ? plan.token_ranks[token * lane.most_ranks + slot()] : -1};
  }

  // A token's first row in staging.
  __device__ std::int64_t first_row(const TokenEntry& entry) const {
    return std::int64_t{entry.token} * (partial() ? call.lane.most_ranks : call.lane.top_k);
  }
  // [thread] Row `index` of staging. Packed: null if it has not arrived.
  __device__ const std::byte* row_at(std::int64_t index) const {
    if (!packs<Traits>(call)) return memory::combine_row(call.lane, call.lane.rank, parity(), index);
    const LLPacket arrived = call.packed.arrived[index];
    return arrived.call == number ? reinterpret_cast<const std::byte*>(arrived.word) : nullptr;
  }
  // The row of this thread's position or slot; null if there is none.
  __device__ const std::byte* staged_row(const TokenEntry& entry) const {
    const int rows = partial() ? call.lane.most_ranks : call.lane.top_k;
    if (packs<Traits>(call) && slot() >= rows) return nullptr;
    return row_at(first_row(entry) + slot());
  }

  // [warp] Waits for the slice's quarters of the rows in `terms->staged`, and removes rows that their sender
  // has not sent, which only a damaged plan causes. `sender`: of this thread's row. False: the call was
  // aborted.
  __device__ bool await_staged(const TokenEntry& entry, const RowSlice& slice, std::int32_t sender,
                               TokenTerms* terms) const {
    const Quarters& quarters = slice.quarters;
    const LaneView& lane = call.lane;
    std::uint32_t missing = 0;
    bool aborted = false;
    const int highest = 32 - __clz(static_cast<int>(terms->staged));
    // A route's weight is covered by the flag of its first quarter.
    const int each = quarters.count() + (!partial() && quarters.first > 0 ? 1 : 0);
#pragma unroll 1
    for (int base = 0; base < highest * each; base += 32) {
      const int row = (base + slot()) / each, flag = (base + slot()) % each;
      const int quarter = flag < quarters.count() ? quarters.first + flag : 0;
      const int peer = __shfl_sync(~0u, sender, row % 32);
      if (row >= highest || (terms->staged >> row & 1) == 0) continue;
      // A thread acquires each flag: the sender stored the quarter before the flag.
      const WaitResult result =
          wait_flag(lane, memory::combine_flags(lane, lane.rank, parity(), first_row(entry) + row) + quarter,
                    memory::end_of_stream_flag(lane, Payload::rows, lane.rank, parity(), peer),
                    {Operation::combine, number, peer});
      aborted = aborted || result == WaitResult::aborted;
      if (result != WaitResult::end_of_data) continue;
      missing |= 1u << row;
      if (quarter == 0 && slice.first) record_bad_source(lane, first_row(entry) + row);
    }
    __syncwarp();
    // The reduction also orders each thread's acquire before all threads' reads.
    terms->staged &= ~__reduce_or_sync(~0u, missing);
    return !__any_sync(~0u, aborted);
  }

  // partial: the terms of a token's sum. `rank`: the sender of the sum of this thread's position, or -1.
  // `own_position`: of this rank in the token's list of ranks, or -1.
  __device__ TokenTerms terms_by_rank(const TokenEntry& entry, std::int32_t* rank, int* own_position) const {
    const LaneView& lane = call.lane;
    const std::int64_t index = first_row(entry) + slot(),
                       route = std::int64_t{entry.token} * lane.top_k + slot();
    *rank = entry.rank;
    const std::uint32_t ends = __ballot_sync(~0u, *rank == -1);
    if (ends != 0 && slot() > __ffs(static_cast<int>(ends)) - 1) *rank = -1;
    if (*rank != -1 && !valid_entry(lane, *rank, lane.ranks, index)) *rank = -1;
    const bool here = *rank == lane.rank && !call.own_staged;
    const std::uint32_t own = __ballot_sync(~0u, here);
    TokenTerms terms{{-1, 0, 1.0f}, __ballot_sync(~0u, *rank >= 0 && !here)};
    *own_position = own != 0 ? __ffs(static_cast<int>(own)) - 1 : -1;
    if (own == 0) return terms;
    const bool mine = entry.destination == lane.rank;
    if (entry.destination != -1) valid_entry(lane, entry.destination, lane.ranks, route);
    terms.own = rows_of_token(call, mine ? entry.row : -1, total, route);
    if (mine && weights_travel<Traits>(call)) terms.own.weight = call.topk_weights[route];
    return terms;
  }

  // partial: stores the values of a token's slots. `rank`: at this thread's position.
  __device__ void store_route_values(const TokenEntry& entry, const TokenTerms& terms, std::int32_t rank,
                                     int own_position) const {
    const LaneView& lane = call.lane;
    const std::int64_t route = std::int64_t{entry.token} * lane.top_k + slot();
    int position = -1;  // of this slot's rank in the token's list of ranks
#pragma unroll 1
    for (int k = 0; k < lane.top_k; ++k) {
      const std::int32_t destination = __shfl_sync(~0u, entry.destination, k);
      const std::uint32_t found = __ballot_sync(~0u, rank >= 0 && rank == destination);
      if (slot() == k) position = __ffs(static_cast<int>(found)) - 1;
    }
    if (slot() >= lane.top_k) return;
    float value = 0;
    if (entry.row != -1 && position < 0) {
      record_bad_source(lane, route);
    } else if (entry.row != -1 && position == own_position) {
      if (terms.own.row >= 0) value = call.row_values[terms.own.row];
    } else if (entry.row != -1 && (terms.staged >> position & 1) != 0) {
      const std::byte* sum = row_at(first_row(entry) + position);
      value = reinterpret_cast<const float*>(sum + call.row.tail_offset)[slot()];
    }
    call.route_values[route] = value;
  }

  // The positions of `staged` whose sums arrive in LL packets. `rank`: at this thread's position.
  __device__ std::uint32_t packet_positions(const TokenEntry& entry, std::int32_t rank,
                                            std::uint32_t staged) const {
    if (packs<Traits>(call)) return 0;
    if (!Traits::kSpecialised && call.route_values != nullptr) return 0;
    const std::int32_t messages = sent_messages.of(max(rank, 0));
    return __ballot_sync(~0u, is_among(staged) && returns_as_packets(call.lane, messages, entry.token));
  }

  __device__ std::byte* ll_row(const TokenEntry& entry, int position) const {
    return memory::ll_row(call.lane, call.lane.rank, parity(),
                          static_cast<std::int32_t>(first_row(entry)) + position);
  }
  // [warp] Waits for the LL packets of the positions in `packets`, and removes positions that their rank has
  // not sent, which only a damaged plan causes. False: the call was aborted.
  __device__ bool await_packets(const TokenEntry& entry, const RowSlice& slice, std::int32_t rank,
                                std::uint32_t* packets) const {
    const LaneView& lane = call.lane;
    const Columns& columns = slice.columns;
    constexpr int kWidth = static_cast<int>(value_bytes(kCombineType));
#pragma unroll 1
    for (std::uint32_t left = *packets; left != 0; left &= left - 1) {
      const int position = __ffs(static_cast<int>(left)) - 1, peer = __shfl_sync(~0u, rank, position);
      const WaitResult result =
          wait_for_ll_row(lane, ll_row(entry, position), columns.begin * kWidth, columns.end * kWidth,
                          memory::end_of_stream_flag(lane, Payload::rows, lane.rank, parity(), peer),
                          {Operation::combine, number, peer});
      if (result == WaitResult::aborted) return false;
      if (result == WaitResult::ready) continue;
      *packets &= ~(1u << position);
      if (slot() == 0 && slice.first) record_bad_source(lane, first_row(entry) + position);
    }
    return true;
  }

  // [warp] Reduces and stores some columns of a token from this rank's rows and the sums in staging, which
  // have arrived.
  __device__ __forceinline__ void reduce_staged(const TokenEntry& entry, const Columns& columns,
                                                const TokenTerms& terms, int own_position) const {
    const std::byte *own = terms.own.row >= 0 ? output_row(call, terms.own.row) : nullptr,
                    *staged = staged_row(entry);
    const SharedTerms<Traits> shared(call, entry.token, call.lane.most_ranks);
    if (shared.is_streamed()) staged = shared.row;
    // Positions below this rank's, its own sum, positions above: ascending ranks.
    const std::uint32_t lower = own_position >= 0 ? terms.staged & ((1u << own_position) - 1) : terms.staged;
    SumStream stream = open_sum_stream(memory, columns, value_bytes(kCombineType), own, terms.own.row_threads,
                                       staged, terms.staged | shared.streamed);
#pragma unroll 1
    for (int first = columns.begin; first < columns.end; first += PieceColumns<kCombineType>::kColumns) {
      const PackedPiece mine = weighted_sum<kCombineType>(stream, terms.own.row_threads, terms.own.weight);
      PieceSums<kCombineType> sum = {};
      add_rows<kCombineType>(stream, lower, sum);
      if (terms.own.row_threads != 0) add_piece<kCombineType>(mine, sum);
      add_rows<kCombineType>(stream, terms.staged & ~lower, sum);
      shared.template add<kCombineType>(stream, first, columns.end, sum);
      store_results<Traits, kCombineType>(call, result_type(), entry.token, first, columns.end, sum);
    }
  }

  __device__ LLSums ll_sums(const TokenEntry& entry, const Columns& columns, const TokenTerms& terms,
                            int own_position, std::uint32_t packets) const {
    return {.token = entry.token,
            .columns = columns,
            .own_row = terms.own.row >= 0 ? output_row(call, terms.own.row) : nullptr,
            .row_threads = terms.own.row_threads,
            .weight = terms.own.weight,
            .own_position = own_position,
            .staged = terms.staged,
            .packets = packets,
            .shared_row = shared_rows_of_token<Traits>(call, entry.token)};
  }

  // [warp] partial: reduces one slice of a token. False: the call was aborted.
  __device__ bool reduce_by_rank(const TokenEntry& entry, const RowSlice& slice) const {
    std::int32_t rank = -1;
    int own_position = -1;
    TokenTerms terms = terms_by_rank(entry, &rank, &own_position);
    std::uint32_t packets = packet_positions(entry, rank, terms.staged);
    terms.staged &= ~packets;
    if (!await_staged(entry, slice, rank, &terms)) return false;
    if (!Traits::kSpecialised && call.route_values != nullptr && slice.first)
      store_route_values(entry, terms, rank, own_position);
    // A reduction that packets interrupt starts anew, so a result that is added to waits for them first.
    if (adds_to_result<Traits>(call) && !await_packets(entry, slice, rank, &packets)) return false;
#pragma unroll 1
    while (packets != 0) {
      if (reduce_ll_rows<Traits, kCombineType>(
              call, memory, ll_sums(entry, slice.columns, terms, own_position, packets), number))
        return true;
      if (!await_packets(entry, slice, rank, &packets)) return false;
    }
    reduce_staged(entry, slice.columns, terms, own_position);
    return true;
  }

  // [warp] exact and unreduced: reduces or copies one slice of a token; thread k stands for slot k. False:
  // the call was aborted.
  __device__ bool reduce_by_slot(const TokenEntry& entry, const RowSlice& slice) const {
    const LaneView& lane = call.lane;
    const std::int64_t route = std::int64_t{entry.token} * lane.top_k + slot();
    std::int32_t row = entry.row;
    if (row != -1 && !valid_entry(lane, entry.destination, lane.ranks, route)) row = -1;
    const bool here = row != -1 && entry.destination == lane.rank && !call.own_staged;
    if (here && !valid_entry(lane, row, total, route)) row = -1;
    TokenTerms terms{{-1, 0, 1.0f}, __ballot_sync(~0u, row != -1 && !here)};
    if (!await_staged(entry, slice, entry.destination, &terms)) return false;

    const bool own = here && row != -1, received = is_among(terms.staged);
    const std::byte* from = own ? output_row(call, row) : staged_row(entry);
    float weight = 1, value = 0;
    if (own) {
      if (call.row_weights != nullptr) weight = call.row_weights[row];
      if (!Traits::kSpecialised && call.row_values != nullptr) value = call.row_values[row];
    } else if (received) {
      const auto tail = *reinterpret_cast<const RouteTail*>(from + call.row.tail_offset);
      weight = tail.weight;
      value = tail.value;
    }
    if (slot() < lane.top_k && call.topk_weights != nullptr) weight = call.topk_weights[route];
    if (!Traits::kSpecialised && slot() < lane.top_k && call.route_values != nullptr && slice.first)
      call.route_values[route] = value;
    const std::uint32_t row_threads = __ballot_sync(~0u, own || received);
    const Columns& columns = slice.columns;
    if (reduction_of<Traits>(call) == Reduction::unreduced) {
      copy_slots(entry, from, row_threads, columns);
      return true;
    }
    const SharedTerms<Traits> shared(call, entry.token, 0);
    SumStream stream = open_sum_stream(memory, columns, value_bytes(kCombineType), from, row_threads,
                                       shared.row, shared.streamed);
#pragma unroll 1
    for (int first = columns.begin; first < columns.end; first += PieceColumns<kCombineType>::kColumns) {
      PieceSums<kCombineType> sum = {};
      add_weighted<kCombineType>(stream, row_threads, weight, kCombineType, sum);
      shared.template add<kCombineType>(stream, first, columns.end, sum);
      store_results<Traits, kCombineType>(call, result_type(), entry.token, first, columns.end, sum);
    }
    return true;
  }

  // [warp] unreduced: stores each slot's row, and zeros for slots without one.
  __device__ void copy_slots(const TokenEntry& entry, const std::byte* from, std::uint32_t row_threads,
                             const Columns& columns) const {
    const std::int64_t first_slot = std::int64_t{entry.token} * call.lane.top_k;
    SumStream stream = open_sum_stream(memory, columns, value_bytes(kCombineType), from, row_threads);
#pragma unroll 1
    for (int first = columns.begin; first < columns.end; first += PieceColumns<kCombineType>::kColumns) {
      for_each_piece(stream, row_threads, [&](const LoadedPiece& piece, int k) {
        store_piece<kCombineType>(piece, call.result_type, result_row(call, first_slot + k), first,
                                  columns.end);
      });
    }
    const int width = static_cast<int>(value_bytes(call.result_type));
    for (int k = 0; k < call.lane.top_k; ++k) {
      if ((row_threads >> k & 1) != 0) continue;
      std::byte* to = result_row(call, first_slot + k);
      for (int at = columns.begin * width + 16 * slot(); at < columns.end * width; at += 512)
        *reinterpret_cast<uint4*>(to + at) = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ void reduce_all() {
    while (next_token.token >= 0) {
      const TokenEntry entry = next_token;
      next_token = read_next();
      const RowSlice slice = RowSlice::of(entry.slice, splits, call.lane.hidden);
      const bool proceed = partial() ? reduce_by_rank(entry, slice) : reduce_by_slot(entry, slice);
      if (!proceed) return;
    }
  }
};

// [warp] Worker `worker` of `workers`. `sent_messages`: to the rank with this thread's number, as the plan
// has it. `memory`: SumStream::kBytes of shared memory.
template <class Traits>
__device__ __forceinline__ void reduce_tokens(const CombineArguments& call, std::uint64_t number, int worker,
                                              int workers, std::int32_t sent_messages, std::byte* memory) {
  with_type<Traits>(call.combine_type, [&](auto type) {
    TokenReducer<Traits, type.value>(call, number, worker, workers, sent_messages, memory).reduce_all();
  });
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
