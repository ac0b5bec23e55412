// Computes what a step's combine must return, and compares it with what combine wrote.
//
// The expected sums are computed on the token's source rank from the token's own values, which no dispatch
// and no other rank has touched. `x` holds a rank's tokens with the values that reach the experts, [N,
// hidden] (expected_values()).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ferry/topology.hpp"
#include "tools/ferry/common/check_counter.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

inline constexpr double kTolerance = 2e-2;

// Combine's result with scaling experts, exact to the bit: [N, hidden] of RunSpec::type; with Reduction::
// unreduced [N, K, hidden]. `topology`: the nodes of the run.
std::vector<std::byte> expected_products(const RunSpec& spec, const Topology& topology, const Routes& routes,
                                         std::span<const float> x);

// Compares rows of `hidden` values of RunSpec::type. `step` and `rank` only name where a value differs.
void check_rows(const RunSpec& spec, int step, int rank, std::span<const std::byte> expected,
                std::span<const std::byte> found, CheckCounter& counter);

// Applies every token's SwiGLU experts on its source rank in fp32, without any exchange: [N, hidden].
std::vector<float> dense_swiglu(const RunSpec& spec, const Routes& routes, std::span<const float> x);

// Per token, |found - dense| / |dense| (Euclidean norm) may be at most kTolerance; a token whose dense result
// is 0 must be 0. `found` is what combine wrote; unreduced rows are first summed with their weights.
void check_dense(const RunSpec& spec, int step, int rank, const Routes& routes, std::span<const float> dense,
                 std::span<const std::byte> found, CheckCounter& counter);

}  // namespace ferry::app
