// Reduces a token whose partial sums arrive in LL packets (data and call number in one store).
#pragma once

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/combine/ll_rows.cuh"
#include "backends/cuda/combine/result_rows.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// Some columns of a token and the terms of its sum: one for each position in the token's list of ranks,
// either this rank's own rows or the sum that another rank sent. Sets of threads or positions: one bit each.
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
