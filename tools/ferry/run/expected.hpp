// What the calls of a step must return and send, and the comparison of combine's results with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ferry/topology.hpp"
#include "tools/ferry/common/dispatch_check.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/shared_results.hpp"

namespace ferry::app {

// In the terms of tests/oracle.
DispatchCheck dispatch_check(const RunSpec& spec, int step);

// The bytes of the step's tokens as they must be received.
DispatchCheck::TokenParts token_parts(const RunSpec& spec, int step);

// The values with which a rank's tokens reach the experts, [N, hidden]: for fp8 those after quantisation.
std::vector<float> expected_values(const RunSpec& spec, int step, int rank);

// Whether relays add the sums of their nodes. `config` is as below.
bool relays_add(const Config& config);

// Adds the messages of one step, of all ranks, as the routes imply them. `config` is that of the exchange,
// which has chosen hops and reduction level.
void add_planned_messages(const RunSpec& spec, const Config& config, const Topology& topology, int step,
                          const SharedResults& results);

// ---- combine
//
// The expected sums are computed on the token's source rank from the token's own values, which no dispatch
// and no other rank has touched. `x` holds a rank's tokens with the values that reach the experts, [N,
// hidden] (expected_values()).

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
