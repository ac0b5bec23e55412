// Between the reference's own places and the storage of a plan, which all backends share.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/plan_layout.hpp"
#include "reference/places.hpp"

namespace ferry::reference {

// Fills everything but the header.
void write_plan(const World& world, const Places& places, int rank, const PlanView& plan);

}  // namespace ferry::reference
