// What the dispatch of a step must return, in the terms of tests/oracle.
#pragma once

#include <vector>

#include "tools/ferry/common/dispatch_check.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

DispatchCheck dispatch_check(const RunSpec& spec, int step);

// The bytes of the step's tokens as they must be received.
DispatchCheck::TokenParts token_parts(const RunSpec& spec, int step);

// The values with which a rank's tokens reach the experts, [N, hidden]: for fp8 those after quantisation.
std::vector<float> expected_values(const RunSpec& spec, int step, int rank);

}  // namespace ferry::app
