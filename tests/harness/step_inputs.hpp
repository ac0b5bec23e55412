// The inputs of all ranks for one step (a dispatch and its combine), and where the oracle places their rows.
// They are a pure function of the test case and the step's index, so every rank computes the inputs of all
// ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/test_case.hpp"
#include "oracle/combine.hpp"
#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::contract {

struct StepInputs {
  int index = 0;
  oracle::GlobalInputs inputs;
  oracle::RowPositions positions;
  // With TestCase::own_format the tokens of each rank, [tokens, hidden]: the parts in `inputs` are their
  // rows.
  std::vector<std::vector<std::byte>> own_tokens;
};

StepInputs make_inputs(const TestCase& c, int index = 0);

// The routes of `routed` with other values: inputs of a dispatch by the plan of `routed`.
StepInputs with_new_values(const TestCase& c, const StepInputs& routed, int index);

// Uses these ids, [tokens, top_k] of every rank, and draws the rest.
StepInputs inputs_from_ids(const TestCase& c, const std::vector<std::vector<std::int64_t>>& ids,
                           int index = 0);

// The inputs of combine on every rank: experts' output rows, weights, values. Rows that must not be read are
// NaN.
oracle::ExpertOutputs make_expert_outputs(const TestCase& c, const StepInputs& step);

// A case with the inputs of one step, drawn before the ranks start: in a body, every rank would repeat the
// work.
struct PreparedStep {
  TestCase c;
  StepInputs step;
  oracle::ExpertOutputs expert_outputs;
};

PreparedStep prepare(const TestCase& c, int index = 0);

// Steps 0 to count - 1 of a case.
std::vector<PreparedStep> prepare_steps(const TestCase& c, int count);

// DispatchOptions::dot_rows of one rank: [total, hidden] of combine_type.
std::vector<std::byte> make_dot_rows(const TestCase& c, const StepInputs& step, int rank);

// `count` random values. any_bits: any bit pattern, with 0 and -0 frequent; otherwise magnitudes near 1.
std::vector<std::byte> random_rows(Random& random, DType type, std::int64_t count, bool any_bits);
std::vector<float> random_floats(Random& random, std::int64_t count);

}  // namespace ferry::contract
