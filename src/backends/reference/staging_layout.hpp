// Where a rank of the reference backend lays out what its peers read: its whole inputs, in its own symmetric
// memory.
//
// For each lane: the channel, then two generations of [ids, numbers, rows]. A call of a lane uses one
// generation.
#pragma once

#include <cstdint>

#include "ferry/config.hpp"

namespace ferry::reference {

struct Stage {
  std::int64_t channel;   // bytes
  std::int64_t dispatch;  // ids [T, K] int64, weights or values [T, K] fp32, rows of tokens
  std::int64_t combine;   // rows [most rows of a rank] of the wire type, weights and values of rows
  std::int64_t slots;     // T * K
  std::int64_t rows;      // most rows of a rank

  explicit Stage(const Config& config);

  std::int64_t lane_bytes() const { return channel + 2 * (dispatch + combine); }
  std::int64_t channel_of(int lane) const { return lane * lane_bytes(); }
  std::int64_t dispatch_of(int lane, int parity) const {
    return channel_of(lane) + channel + parity * (dispatch + combine);
  }
  std::int64_t combine_of(int lane, int parity) const { return dispatch_of(lane, parity) + dispatch; }
};

// What a rank says about its call beside the staged bytes.
struct Note {
  std::int64_t count = 0;  // tokens (dispatch), rows (combine), the count itself (metadata)
  // Arguments that all ranks give or none does: 1 given, 0 not, or kNothing on a rank that has nothing to
  // give them for.
  static constexpr std::int32_t kNothing = -1;
  std::int32_t weighted = kNothing;      // weights
  std::int32_t rows_given = kNothing;    // combine: outputs, or the result where no rows are
  std::int32_t values_given = kNothing;  // combine: row values, or route values where no rows are

  static std::int32_t said(const void* argument, bool matters) {
    return !matters ? kNothing : argument != nullptr ? 1 : 0;
  }
};

}  // namespace ferry::reference
