// LL rows: combine's sums of few tokens, sent as LL packets of a call number and eight bytes of the row, and
// their reduction.
//
// A flag must come after the row it announces, and the fence for that waits for a round trip to the other
// device. LL packets need no fence. They double the bytes, which costs less than the fence when tokens are
// few.
#pragma once

#include "backends/cuda/combine/result_rows.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/wait.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// Whether the sum for a token returns to its source rank as LL packets. `messages`: from the source rank to
// the summing rank; the plans of both know it. The limit falls with the number of ranks, because their
// doubled bytes share a link.
__device__ __forceinline__ bool returns_as_packets(const LaneView& lane, std::int32_t messages,
                                                   std::int32_t token) {
  return messages * max(lane.ranks - 1, 1) <= kLLTokens && token < kLLTokens;
}

// This thread's first packet for 512 bytes of a row; its second is 32 packets further. Packets of the first
// eight of each thread's 16 bytes come first, then those of the second eight. `row`: of packets; `at`: offset
// of the 512 bytes in the row they encode.
__device__ __forceinline__ LLPacket* first_packet(std::byte* row, int at) {
  return reinterpret_cast<LLPacket*>(row + 2 * at) + threadIdx.x % 32;
}

// [warp] Stores 512 bytes, 16 a thread.
__device__ __forceinline__ void store_packets(std::byte* row, int at, const uint4& raw, std::uint64_t call) {
  LLPacket* packet = first_packet(row, at);
  store_packet_relaxed_sys(packet, {call, std::uint64_t{raw.y} << 32 | raw.x});
  store_packet_relaxed_sys(packet + 32, {call, std::uint64_t{raw.w} << 32 | raw.z});
}

// [thread] Stores kCount computed values of a row of `type`, from column `column` on.
template <int kCount>
__device__ void store_value_packets(DType type, std::byte* row, int column, const float (&value)[kCount],
                                    std::uint64_t call) {
  const int width = static_cast<int>(value_bytes(type)), each = 8 / width;
  std::uint32_t word[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) word[i] = bits_of(canonical(value[i]));
  if (type != DType::fp32) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i)
      word[i] = type == DType::bf16 ? pack_two<DType::bf16>(value[2 * i], value[2 * i + 1])
                                    : pack_two<DType::fp16>(value[2 * i], value[2 * i + 1]);
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    if (i * each >= kCount) break;
    const int at = column * width + 8 * i;
    auto* packet = reinterpret_cast<LLPacket*>(row + 2 * (at & ~511)) + (at >> 3 & 1) * 32 + (at >> 4 & 31);
    store_packet_relaxed_sys(packet, {call, std::uint64_t{word[2 * i + 1]} << 32 | word[2 * i]});
  }
}

// [warp] Stores a piece of a row. `first`: its first column; `end`: the row's columns.
template <DType kType>
__device__ __forceinline__ void store_piece_packets(const PackedPiece& piece, std::byte* row, int first,
                                                    int end, std::uint64_t call) {
#pragma unroll
  for (int d = 0; d < kPieceAccesses; ++d) {
    if (PieceColumns<kType>::column(first, d) < end)
      store_packets(row, first * static_cast<int>(value_bytes(kType)) + d * kGranule, piece.raw(d), call);
  }
}
// [warp] Stores packets of sums, rounded to `type`.
template <DType kType>
__device__ __forceinline__ void store_sum_packets(DType type, std::byte* row, int first, int end,
                                                  const PieceSums<kType>& sum, std::uint64_t call) {
#pragma unroll
  for (int d = 0; d < kPieceAccesses; ++d) {
    const int column = PieceColumns<kType>::column(first, d);
    if (column < end) store_value_packets(type, row, column, sum[d], call);
  }
}

// This thread's packets for 512 bytes of a row, loaded once, ready or not.
struct LoadedPackets {
  LLPacket low, high;

  // Loads the packets if the thread `wants` them and the row is that long. Packets that are not loaded count
  // as ready.
  __device__ __forceinline__ void load(std::byte* row, int at, int end, std::uint64_t call, bool wants) {
    low = high = {call, 0};
    if (!wants || at + 16 * static_cast<int>(threadIdx.x % 32) >= end) return;
    low = load_packet_relaxed_sys(first_packet(row, at));
    high = load_packet_relaxed_sys(first_packet(row, at) + 32);
  }
  __device__ __forceinline__ bool here(std::uint64_t call) const {
    return low.call >= call && high.call >= call;
  }
  __device__ __forceinline__ uint4 raw() const {
    return make_uint4(static_cast<std::uint32_t>(low.word), static_cast<std::uint32_t>(low.word >> 32),
                      static_cast<std::uint32_t>(high.word), static_cast<std::uint32_t>(high.word >> 32));
  }
};

// [warp] Each thread waits for its first packet of bytes [at, end) of a row that is not ready; the others
// will follow soon, and the caller looks again. `end_of_stream`: the sender's flag. Returns
// WaitResult::end_of_data if some packet never comes.
static __device__ __noinline__ WaitResult wait_for_ll_row(const LaneView& lane, std::byte* row, int at,
                                                          int end, const Flag* end_of_stream,
                                                          WaitTarget awaited) {
  WaitResult result = WaitResult::ready;
  bool waited = false;
  for (int half = 0; at + 16 * static_cast<int>(threadIdx.x % 32) < end && !waited; half ^= 32) {
    const LLPacket* packet = first_packet(row, at) + half;
    waited = load_packet_relaxed_sys(packet).call < awaited.call;
    if (waited) result = wait_long(lane, packet, end_of_stream, awaited);
    if (half != 0) at += kGranule;
  }
  if (__any_sync(~0u, result == WaitResult::aborted)) return WaitResult::aborted;
  return __any_sync(~0u, result == WaitResult::end_of_data) ? WaitResult::end_of_data : WaitResult::ready;
}

// Reduction of a token whose partial sums arrive in LL packets: some columns of the token and the terms of
// its sum: one for each position in the token's list of ranks, either this rank's own rows or the sum that
// another rank sent. Sets of threads or positions: one bit each.
struct LLSums {
  std::int32_t token;
  Columns columns;
  const std::byte* own_row;     // this thread's row on this rank, if it is in `row_threads`
  std::uint32_t row_threads;    // threads with a row on this rank
  float weight;                 // of own_row
  int own_position;             // of this rank in the token's list of ranks
  std::uint32_t staged;         // positions whose sums lie in staging
  std::uint32_t packets;        // positions whose sums arrive in LL packets
  const std::byte* shared_row;  // of the shared expert with this thread's number, or null
};

inline constexpr int kPositionsInFlight = 4;

// [warp] Reduces one access of columns from `first` on and stores the result. `own`: this rank's sum of them.
// False: packets are still missing. Everything is inlined: a call would spill the sums to memory.
template <class Traits, DType kCombineType>
__device__ __forceinline__ bool reduce_access(const CombineArguments& call, const LLSums& sums,
                                              const uint4& own, int first, std::uint64_t number) {
  constexpr int kWidth = static_cast<int>(value_bytes(kCombineType));
  const LaneView& lane = call.lane;
  const int parity = static_cast<int>(number & 1), first_row = sums.token * lane.most_ranks,
            begin = first * kWidth, end = sums.columns.end * kWidth,
            mine = begin + 16 * static_cast<int>(threadIdx.x % 32);
  float sum[kPerAccess<kCombineType>] = {};
  // Positions are added in ascending order: the result has the same bits in every run.
  std::uint32_t left = sums.staged | sums.packets | (sums.row_threads != 0 ? 1u << sums.own_position : 0);
#pragma unroll 1
  while (left != 0) {
    // Loads of several ranks' sums are in flight at once.
    LoadedPackets loaded[kPositionsInFlight];
#pragma unroll 1
    for (unsigned poll = 0;; ++poll) {
      if (poll == kQuickPolls) return false;
      std::uint32_t next = left;
#pragma unroll
      for (auto& packets : loaded) {
        const int position = max(__ffs(static_cast<int>(next)) - 1, 0);
        packets.load(memory::ll_row(lane, lane.rank, parity, first_row + position), begin, end, number,
                     (sums.packets & next & 1u << position) != 0);
        next &= next - 1;
      }
      bool ready = true;
#pragma unroll
      for (const auto& packets : loaded) ready = packets.here(number) && ready;
      if (__all_sync(~0u, ready)) break;
    }
#pragma unroll
    for (const auto& packets : loaded) {
      if (left == 0) break;
      const int position = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      uint4 raw = packets.raw();
      if (position == sums.own_position) {
        raw = own;
      } else if ((sums.staged >> position & 1) != 0 && mine < end) {
        raw = *reinterpret_cast<const uint4*>(
            memory::combine_row(lane, lane.rank, parity, first_row + position) + mine);
      }
      add_access<kCombineType>(raw, sum);
    }
  }
  if constexpr (Traits::kShares) {
#pragma unroll 1
    for (int expert = 0; expert < call.shared_terms; ++expert) {
      const std::byte* const row = pointer_of(sums.shared_row, expert);
      if (row != nullptr && mine < end)
        add_access<kCombineType>(*reinterpret_cast<const uint4*>(row + mine), sum);
    }
  }
  if (mine < end)
    store_result<Traits>(call, call.result_type, result_row(call, sums.token), mine / kWidth, sum);
  return true;
}

// [warp] Reduces and stores the columns. False: packets are still missing; call again, which stores all
// again. `memory`: of a stream.
template <class Traits, DType kCombineType>
__device__ __forceinline__ bool reduce_ll_rows(const CombineArguments& call, std::byte* memory,
                                               const LLSums& sums, std::uint64_t number) {
  constexpr int kAccess = 32 * kPerAccess<kCombineType>;  // columns
  SumStream stream =
      open_sum_stream(memory, sums.columns, value_bytes(kCombineType), sums.own_row, sums.row_threads);
#pragma unroll 1
  for (int piece = sums.columns.begin; piece < sums.columns.end; piece += kPieceAccesses * kAccess) {
    const PackedPiece own = weighted_sum<kCombineType>(stream, sums.row_threads, sums.weight);
#pragma unroll 1
    for (int d = 0; d < kPieceAccesses && piece + d * kAccess < sums.columns.end; ++d) {
      uint4 mine = own.raw(0);
#pragma unroll
      for (int i = 1; i < kPieceAccesses; ++i) {
        if (i == d) mine = own.raw(i);
      }
      if (reduce_access<Traits, kCombineType>(call, sums, mine, piece + d * kAccess, number)) continue;
      // Copies in flight still write to the stream's memory: wait before it is used again.
      wait_async_but<0>();
      return false;
    }
  }
  return true;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
