// The memory of a lane of an exchange of experts in slices.
#pragma once

#include <cstdint>

#include "ferry/config.hpp"

namespace ferry::cuda {

inline constexpr std::int64_t kSliceAlignment = 256;  // of arrays, in bytes

// Offsets of a lane's arrays in device memory. The size query and the construction both use this.
struct SlicedArrays {
  std::int64_t parts = 0, source = 0, weight = 0, counts = 0, row_offsets = 0, group_expert = 0;
  std::int64_t result_bytes = 0;  // bytes of all arrays above
  std::int64_t state = 0;
  std::int64_t all_calls = 0;  // SliceTotals
  std::int64_t terms = 0;      // of this rank, then of all ranks
  std::int64_t ids = 0;        // int64 [T / tp, K] of the slice
  std::int64_t weights = 0;    // fp32 [T / tp, K]
  std::int64_t tokens = 0;     // of the slice, whose choice is known on the device only
  std::int64_t segments = 0;   // SegmentTables
  std::int64_t own = 0;        // what this rank contributes to a gather, or takes from one that adds
  std::int64_t all = 0;        // the same for the whole sub-group
  std::int64_t row_weights = 0;
  std::int64_t bytes = 0;
};
SlicedArrays sliced_arrays(const Config& config, int rank);

}  // namespace ferry::cuda
