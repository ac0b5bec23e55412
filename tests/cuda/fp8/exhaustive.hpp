// Runs the quantisation of the dispatch kernels on many blocks and compares every byte, on the device, with
// the formula in double (formula.hpp).
#pragma once

#include <cstdint>

#include "ferry/format.hpp"
#include "ferry/types.hpp"

namespace ferry::contract {

struct Fp8Comparison {
  unsigned long long values = 0;      // compared, without scales
  unsigned long long mismatches = 0;  // values and scales
  // One mismatch. `input` and `amax` are bits of fp32; for a scale `input` is amax, and `got` and `expected`
  // are bits of fp32 or, packed, one byte.
  std::uint32_t amax = 0, input = 0, got = 0, expected = 0;
  unsigned int taken = 0;  // whether there is one
};

// Blocks with every 16-bit magnitude as amax, and in them every value of at most this magnitude and every
// NaN, of both signs. `type`: bf16 or fp16. `whole_rows`: through the code for rows that are streamed.
Fp8Comparison compare_16_bit(DType type, const Fp8Options& options, bool whole_rows);

// fp32: at least `values` random values. A block's exponents lie close together, or anywhere.
Fp8Comparison compare_random_fp32(std::uint64_t seed, std::int64_t values, const Fp8Options& options);

// fp32: amaxes of every exponent and at the limits of the formula; with each, the values at and next to every
// boundary between two results.
Fp8Comparison compare_boundaries_fp32(std::uint64_t seed, const Fp8Options& options);

}  // namespace ferry::contract
