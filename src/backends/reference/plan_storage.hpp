// Between the reference's own places and the storage of a plan, which all backends share.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/plan_layout.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::reference {

// Fills everything but the header.
void write_plan(const oracle::GlobalInputs& global, const oracle::RowPositions& positions, int rank,
                const PlanView& plan);

}  // namespace ferry::reference
