// The part of a token's row that one warp reduces.
#pragma once

#include "backends/cuda/combine/row_sums.cuh"
#include "backends/cuda/dispatch/send_partition.hpp"

namespace ferry::cuda {

inline constexpr int kMaxSplits = kLog2Quarters + 3;  // where tokens are few: 32 slices of a row

// The slice of a token's row that a warp reduces. Where tokens are few, slices are smaller than a quarter:
// the warps of a quarter all wait for its flag, unless the sums arrive in LL packets.
struct RowSlice {
  Quarters quarters;  // that contain the columns
  Columns columns;
  bool first;  // this warp also handles the values beside the row

  // Slice `slice` of 1 << splits.
  __device__ __forceinline__ static RowSlice of(int slice, int splits, int hidden) {
    const int finer = max(splits - kLog2Quarters, 0);
    const Quarters quarters = Quarters::of(slice >> finer, splits - finer);
    const Columns all = columns_of(quarters, hidden);
    if (finer == 0) return {quarters, all, slice == 0};
    const int part = slice & ((1 << finer) - 1), granularity = 256 << finer,
              columns = (all.end - all.begin + granularity - 1) / granularity * 256;
    return {quarters,
            {min(all.begin + part * columns, all.end), min(all.begin + (part + 1) * columns, all.end)},
            slice == 0};
  }
};

}  // namespace ferry::cuda
