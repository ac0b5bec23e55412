// Sums of a token at home where others' come in units.
#pragma once

#include "cuda/combine.hpp"
#include "cuda/unit_rows.cuh"

namespace ferry::cuda {

// Some columns of a token, and what is added up for them: at each position of its ranks this rank's own rows
// or another's sum. Sets of threads or positions: one bit each.
struct UnitSums {
  std::int32_t token;
  Columns columns;
  const std::byte* own;  // this thread's row, of those in `kept`
  std::uint32_t kept;
  float weight;
  int own_position;
  std::uint32_t staged, units;  // positions whose sums lie in staging, and come in units
};

// kCount accesses of a piece, from the kFrom-th on. `own`: this rank's sum.
template <DType kWire, int kFrom, int kCount>
__device__ __forceinline__ bool add_part(const CombineArguments& call, const UnitSums& sums,
                                         const PackedPiece& own, int first, std::uint64_t number) {
  constexpr int kWidth = static_cast<int>(value_bytes(kWire));
  const LaneView& lane = call.lane;
  const int generation = static_cast<int>(number & 1), first_row = sums.token * lane.most_ranks;
  float sum[kCount][kPerAccess<kWire>] = {};
#pragma unroll 1
  for (std::uint32_t left = sums.staged | sums.units | (sums.kept != 0 ? 1u << sums.own_position : 0);
       left != 0; left &= left - 1) {
    const int of = __ffs(static_cast<int>(left)) - 1;
    uint4 held[kCount] = {};
    if (of == sums.own_position) {
#pragma unroll
      for (int d = 0; d < kCount; ++d) held[d] = own.raw(kFrom + d);
    } else if ((sums.units >> of & 1) != 0) {
      std::byte* row = lane.unit_row(lane.rank, generation, first_row + of);
      if (!take_units<kCount>(row, first * kWidth + kFrom * kGranule, sums.columns.end * kWidth, number,
                              held))
        return false;
    } else {
      const std::byte* row = lane.combine_row(lane.rank, generation, first_row + of);
#pragma unroll
      for (int d = 0; d < kCount; ++d) {
        const int column = PieceColumns<kWire>::column(first, kFrom + d);
        if (column < sums.columns.end) held[d] = *reinterpret_cast<const uint4*>(row + column * kWidth);
      }
    }
#pragma unroll
    for (int d = 0; d < kCount; ++d) add_access<kWire>(held[d], sum[d]);
  }
#pragma unroll
  for (int d = 0; d < kCount; ++d) {
    const int column = PieceColumns<kWire>::column(first, kFrom + d);
    if (column < sums.columns.end)
      store_values(call.result_type, call.result + sums.token * call.result_stride, column, sum[d]);
  }
  return true;
}

// By one warp: adds up and stores. False: units are not here yet. `memory`: of a stream.
template <DType kWire>
__device__ __forceinline__ bool add_up_units(const CombineArguments& call, std::byte* memory,
                                             const UnitSums& sums, std::uint64_t number) {
  constexpr int kHalf = (kDeep + 1) / 2;
  SumStream stream = stream_of(memory, sums.columns, value_bytes(kWire), sums.own, sums.kept);
#pragma unroll 1
  for (int first = sums.columns.begin; first < sums.columns.end; first += PieceColumns<kWire>::kColumns) {
    const PackedPiece own = sum_weighed<kWire>(stream, sums.kept, sums.weight);
    if (!add_part<kWire, 0, kHalf>(call, sums, own, first, number) ||
        !add_part<kWire, kHalf, kDeep - kHalf>(call, sums, own, first, number)) {
      // What is still on its way comes into the stream's memory.
      wait_async_but<0>();
      return false;
    }
  }
  return true;
}

}  // namespace ferry::cuda
