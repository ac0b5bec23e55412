// What a step's combine must bring, and the comparison with what it brought.
//
// The arithmetic of combine is done again here from a token's own values, so from what no dispatch or other
// rank has touched. `x` is a rank's tokens as experts see them, [N, hidden] (StepOracle::arriving).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tools/ferry/common/check_counter.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

inline constexpr double kTolerance = 2e-2;

// After Experts::multiply, to the bit: [N, hidden] of Job::type, unreduced [N, K, hidden].
std::vector<std::byte> expected_products(const Job& job, const Routes& routes, std::span<const float> x);

// Compares rows of `hidden` values of Job::type. `step` and `rank` are named where one differs.
void check_rows(const Job& job, int step, int rank, std::span<const std::byte> expected,
                std::span<const std::byte> found, Tally& tally);

// Every token through its SwiGLU experts where it is, in fp32, without any exchange: [N, hidden].
std::vector<float> dense_swiglu(const Job& job, const Routes& routes, std::span<const float> x);

// |found - dense| / |dense| of every token, in the Euclidean norm, may be kTolerance; a token whose dense
// result is 0 must be 0. `found` is what combine wrote; unreduced rows are weighed and added here first.
void check_dense(const Job& job, int step, int rank, const Routes& routes, std::span<const float> dense,
                 std::span<const std::byte> found, Tally& tally);

}  // namespace ferry::app
