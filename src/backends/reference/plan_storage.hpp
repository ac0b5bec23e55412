// Converts the oracle's row positions to the plan storage that all backends share.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/plan_layout.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::reference {

// Fills all arrays of the plan of `rank`. The caller writes the header.
void write_plan(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions, int rank,
                const PlanView& plan);

}  // namespace ferry::reference
