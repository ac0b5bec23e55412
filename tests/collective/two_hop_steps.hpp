// Steps of a layer on simulated nodes, for the tests of two hops.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"

namespace ferry::test {

constexpr int kHidden = 64;

struct Nodes {
  const char* name;
  std::vector<int> labels;  // node of each rank
};

// Uneven nodes, and nodes whose ranks are not consecutive.
inline const Nodes kNodes[] = {{"2 x 2", {0, 0, 1, 1}},
                               {"taking turns", {0, 1, 0, 1}},
                               {"3 + 1", {0, 0, 0, 1}},
                               {"1 + 2 + 5", {0, 1, 1, 2, 2, 2, 2, 2}},
                               {"5 + 3 mixed", {0, 1, 0, 0, 1, 0, 1, 0}},
                               {"4 x 4 mixed", {0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0}}};

// Runs `body` as every rank, in threads, one simulated host for each node, with an engine that takes its
// functions from `functions`. Returns what each rank threw.
std::vector<std::string> run_hosts_with_engine(const std::vector<int>& labels,
                                               const std::function<EngineFunctions(int)>& functions,
                                               const std::function<void(Rank)>& body);

// Runs `body` as every rank, in threads on simulated nodes, so that this backend has two hops there:
// `collective` with an engine of the tests, `cpu` with shared memory. A rank that throws fails the test.
void run_nodes(BackendKind backend, const std::vector<int>& labels, const std::function<void(Rank)>& body);

Config two_hop_config(BackendKind backend, int ranks, Hops hops, int window = 0,
                      ReductionLevel level = ReductionLevel::automatic);

// The inputs of one rank.
struct Inputs {
  std::int64_t count;
  std::vector<float> tokens, weights;
  std::vector<std::int32_t> ids;

  Inputs(const Config& config, int rank, std::int64_t tokens_of_rank);
  Tokens given() const { return {.parts = {tokens.data()}, .count = count, .type = DType::fp32}; }
};

// Rank 1 has no tokens, every other one fewer than the one before.
Inputs inputs_of(const Config& config, int rank);

// A rank's outcome: every array of the dispatch, and the results of combine.
struct Outcome {
  std::vector<float> rows, weights, partial, exact;
  std::vector<std::int32_t> counts;
  std::vector<Source> sources;

  bool operator==(const Outcome&) const = default;
};

// How a rank calls. `together`: in phases, and every rank has sent before any receives.
enum class Form { fused, phases, together };

DispatchResult dispatch(Exchange& exchange, const Inputs& inputs, Form form);
void combine(Exchange& exchange, const DispatchResult& received, const Outputs& outputs, const Inputs& inputs,
             Reduction reduction, Form form, std::vector<float>& result);
// A dispatch, a combine with `partial` and one with `exact`, with the received rows as outputs.
Outcome step(Exchange& exchange, const Inputs& inputs, Form form);

}  // namespace ferry::test
