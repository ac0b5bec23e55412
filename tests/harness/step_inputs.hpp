// What all ranks bring to one dispatch and the combine after it: a pure function of the case and the step's
// number, so that every rank knows the inputs of all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/test_case.hpp"
#include "oracle/combine.hpp"
#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::contract {

struct Step {
  int index = 0;
  oracle::GlobalInputs global;
  oracle::RowPositions positions;
};

Step make_step(const Case& c, int index = 0);

// Other values along the same routes: a dispatch by the plan of `routed`.
Step with_values(const Case& c, const Step& routed, int index);

// A world with these ids, [tokens, top_k] of every rank; the rest is drawn.
Step step_of_ids(const Case& c, const std::vector<std::vector<std::int64_t>>& ids, int index = 0);

// The experts' rows of every rank and all that goes with them. Rows that must not be read are NaN.
oracle::Outcome make_outcome(const Case& c, const Step& step);

// Rows v of DispatchOptions::dot_rows on one rank: [total, hidden] of the wire type.
std::vector<std::byte> make_dot_rows(const Case& c, const Step& step, int rank);

// Dense rows of random values. any_bits: every bit pattern, 0 and -0 often, otherwise magnitudes near 1.
std::vector<std::byte> random_rows(Random& random, DType type, std::int64_t count, bool any_bits);
std::vector<float> random_floats(Random& random, std::int64_t count);

}  // namespace ferry::contract
