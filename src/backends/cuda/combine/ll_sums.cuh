// Sums of a token at home where others' come in units.
#pragma once

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/device/ll_rows.cuh"

namespace ferry::cuda {

// Some columns of a token, and what is added up for them: at each position of its ranks this rank's own rows
// or another's sum. Sets of threads or positions: one bit each.
struct LLSums {
  std::int32_t token;
  Columns columns;
  const std::byte* own;  // this thread's row, of those in `kept`
  std::uint32_t kept;
  float weight;
  int own_position;
  std::uint32_t staged, units;  // positions whose sums lie in staging, and come in units
};

inline constexpr int kPositionsAtOnce = 4;

// One access, of columns from `first` on. `own`: this rank's sum of them. Calls no function, which would put
// what is added up in memory.
template <DType kWire>
__device__ __forceinline__ bool add_access_of_all(const CombineArguments& call, const LLSums& sums,
                                                  const uint4& own, int first, std::uint64_t number) {
  constexpr int kWidth = static_cast<int>(value_bytes(kWire));
  const LaneView& lane = call.lane;
  const int parity = static_cast<int>(number & 1), first_row = sums.token * lane.most_ranks,
            begin = first * kWidth, end = sums.columns.end * kWidth,
            mine = begin + 16 * static_cast<int>(threadIdx.x % 32);
  float sum[kPerAccess<kWire>] = {};
  std::uint32_t left = sums.staged | sums.units | (sums.kept != 0 ? 1u << sums.own_position : 0);
#pragma unroll 1
  while (left != 0) {
    // Sums of several ranks are on their way to this thread at once.
    LoadedUnits units[kPositionsAtOnce];
#pragma unroll 1
    for (unsigned look = 0;; ++look) {
      if (look == kQuickPolls) return false;
      std::uint32_t some = left;
#pragma unroll
      for (auto& of_one : units) {
        const int of = max(__ffs(static_cast<int>(some)) - 1, 0);
        of_one.load(lane.unit_row(lane.rank, parity, first_row + of), begin, end, number,
                    (sums.units & some & 1u << of) != 0);
        some &= some - 1;
      }
      bool here = true;
#pragma unroll
      for (const auto& of_one : units) here = of_one.here(number) && here;
      if (__all_sync(~0u, here)) break;
    }
#pragma unroll
    for (const auto& of_one : units) {
      if (left == 0) break;
      const int of = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      uint4 raw = of_one.raw();
      if (of == sums.own_position) {
        raw = own;
      } else if ((sums.staged >> of & 1) != 0 && mine < end) {
        raw = *reinterpret_cast<const uint4*>(lane.combine_row(lane.rank, parity, first_row + of) + mine);
      }
      add_access<kWire>(raw, sum);
    }
  }
  if (mine < end)
    store_values(call.result_type, call.result + sums.token * call.result_stride, mine / kWidth, sum);
  return true;
}

// By one warp: adds up and stores. False: units are not here yet. `memory`: of a stream.
template <DType kWire>
__device__ __forceinline__ bool add_up_units(const CombineArguments& call, std::byte* memory,
                                             const LLSums& sums, std::uint64_t number) {
  constexpr int kAccess = 32 * kPerAccess<kWire>;  // columns
  SumStream stream = stream_of(memory, sums.columns, value_bytes(kWire), sums.own, sums.kept);
#pragma unroll 1
  for (int piece = sums.columns.begin; piece < sums.columns.end; piece += kDeep * kAccess) {
    const PackedPiece own = sum_weighed<kWire>(stream, sums.kept, sums.weight);
#pragma unroll 1
    for (int d = 0; d < kDeep && piece + d * kAccess < sums.columns.end; ++d) {
      uint4 mine = own.raw(0);
#pragma unroll
      for (int i = 1; i < kDeep; ++i) {
        if (i == d) mine = own.raw(i);
      }
      if (add_access_of_all<kWire>(call, sums, mine, piece + d * kAccess, number)) continue;
      // What is still on its way comes into the stream's memory.
      wait_async_but<0>();
      return false;
    }
  }
  return true;
}

}  // namespace ferry::cuda
