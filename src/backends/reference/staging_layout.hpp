// The symmetric memory of the reference backend. A rank writes its whole inputs into its own region, and its
// peers read them there.
//
// For each lane: the channel, then two staging buffers. Each holds a dispatch section [ids, numbers, rows]
// and a combine section [rows, weights, values,
// sources]. Calls of a lane alternate between the two buffers.
#pragma once

#include <cstdint>

#include "ferry/config.hpp"

namespace ferry::reference {

struct StagingLayout {
  // Bytes of each section.
  std::int64_t channel;
  std::int64_t dispatch;  // ids [T, K] int64; weights or values [T, K] fp32; rows [T]
  std::int64_t combine;   // rows [max_rows] of the combine type; their weights, values (fp32) and sources

  std::int64_t slots;     // T * K
  std::int64_t max_rows;  // the largest row capacity of any rank

  explicit StagingLayout(const Config& config);

  std::int64_t lane_bytes() const { return channel + 2 * (dispatch + combine); }
  std::int64_t channel_of(int lane) const { return lane * lane_bytes(); }
  std::int64_t dispatch_of(int lane, int parity) const {
    return channel_of(lane) + channel + parity * (dispatch + combine);
  }
  std::int64_t combine_of(int lane, int parity) const { return dispatch_of(lane, parity) + dispatch; }
};

// The call summary that a rank sends to its peers besides the staged bytes.
struct CallSummary {
  std::int64_t count = 0;     // tokens (dispatch), rows (combine), the count itself (metadata)
  std::int64_t rows_end = 0;  // combine: rows from it on were not stored (ReceiveBuffers::rows)
  std::int64_t held = 0;      // all_gather_v, reduce_scatter_v: as GatherTerms::held
  // Whether this rank was given arguments that all ranks must be given or none: 1 yes, 0 no, kIrrelevant if
  // it has no tokens or rows that the argument would describe.
  static constexpr std::int32_t kIrrelevant = -1;
  std::int32_t weights_given = kIrrelevant;
  std::int32_t rows_given = kIrrelevant;    // combine: outputs, or on a rank without rows the result
  std::int32_t values_given = kIrrelevant;  // combine: row_values, or on a rank without rows route_values

  static std::int32_t given(const void* argument, bool relevant) {
    return !relevant ? kIrrelevant : argument != nullptr ? 1 : 0;
  }
};

}  // namespace ferry::reference
