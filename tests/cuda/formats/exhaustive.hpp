// Runs the code of the dispatch kernels for fp8, mxfp8, mxfp4 and nvfp4 on many blocks and compares every
// byte, on the device, with the formulas in double (formula.hpp).
#pragma once

#include <cstdint>

#include "ferry/format.hpp"
#include "ferry/types.hpp"

namespace ferry::contract {

// Which of the kernels' ways a row takes: from memory, or streamed.
enum class RowWay { plain, streamed };

struct FormatComparison {
  unsigned long long values = 0;      // compared, without scales
  unsigned long long mismatches = 0;  // values and scales
  // One mismatch, as bits of fp32. For a scale `input` is amax; got and expected are a code, a
  // scale byte or, of fp8, the bits of a scale.
  std::uint32_t amax = 0, input = 0, got = 0, expected = 0;
  unsigned int taken = 0;  // whether there is one
};

// Every 16-bit magnitude as amax of a block, and with it every value of at most this magnitude and every NaN,
// of both signs. `g`: of nvfp4.
FormatComparison compare_16_bit(DType type, const Format& format, RowWay way, float g = 1);

// fp32: at least `values` random values. A block's exponents lie close together, or anywhere.
FormatComparison compare_random(std::uint64_t seed, std::int64_t values, const Format& format, float g = 1);

// fp32: amaxes of every exponent, at the limits of the formulas and infinity, and with each the values at and
// next to every boundary of two codes, of both signs.
FormatComparison compare_boundaries(std::uint64_t seed, const Format& format, float g = 1);

}  // namespace ferry::contract
