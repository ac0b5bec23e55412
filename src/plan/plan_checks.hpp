// Checks of a plan's storage, which is a caller's memory and may hold anything.
#pragma once

#include <cstddef>

#include "layout/plan_layout.hpp"

namespace ferry {

// Whether the header is complete and has the checksum that it was written with.
bool is_intact(const PlanHeader& header);

// Throws UsageError unless the plan's storage holds the header of the dispatch that the handle belongs to.
void check_plan_call(const Plan& plan, const PlanHeader& header);

// The header of a plan in host memory. Every number in it is in range, and the storage holds all its tables.
// Throws UsageError otherwise.
const PlanHeader& checked_header(const Plan& plan);

// Throws UsageError unless `address` is aligned as a plan's storage must be.
void check_plan_address(const void* address);

}  // namespace ferry
