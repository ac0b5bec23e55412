// Plans as Python sees them.
#pragma once

#include "arrays/array.hpp"
#include "ferry/plan.hpp"
#include "layout/plan_layout.hpp"
#include "state.hpp"

namespace ferry::python {

struct PyPlan {
  Plan plan;
  nb::object owner{};  // of the storage
  Framework framework = Framework::numpy;
  Device device = kHost;
  PlanShape shape{};
  std::int64_t tokens = 0;        // N of this rank
  std::int64_t known_total = -1;  // device plans: once the host has read it
  std::int64_t most_rows = -1;    // what the caller vouches for; -1: the capacity

  // Of a plan in a lane's own memory, which the lane's next dispatch overwrites; -1 for any other.
  SharedState state{};
  int lane = -1;
  std::uint64_t parity = 0;
  std::uint64_t writes = 0;  // writes_to() its storage

  // Throws UsageError if the storage has been overwritten.
  const Plan& usable() const;
  std::int64_t total() const;  // rows on this rank; UsageError where only the device knows
};

// How often dispatches of this process have written a plan to this memory of a caller.
std::uint64_t writes_to(const void* storage);
void count_write_to(const void* storage);

// Rows that calls with the plan may touch: its total where that is known, else the most there may be.
std::int64_t rows_touched(const PyPlan& plan);

}  // namespace ferry::python
