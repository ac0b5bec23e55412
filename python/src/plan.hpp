// The Python class Plan: a plan with the array that holds it.
#pragma once

#include "arrays/array.hpp"
#include "ferry/plan.hpp"
#include "layout/plan_layout.hpp"
#include "state.hpp"

namespace ferry::python {

struct PyPlan {
  Plan plan;
  nb::object owner{};  // keeps the storage alive
  Framework framework = Framework::numpy;
  Device device = kHost;
  PlanShape shape{};
  std::int64_t tokens = 0;        // N of this rank
  std::int64_t known_total = -1;  // plans in device memory: the total, once the host has read it
  std::int64_t row_bound = -1;    // set_row_bound(); -1: the capacity

  // A plan in a lane's own memory, which the lane's next dispatch overwrites. Other plans have lane -1.
  SharedState state{};
  int lane = -1;
  std::uint64_t plan_version = 0;    // LaneStatus::plan_version when it was written
  std::uint64_t header_check = 0;    // PlanHeader::check when it was written, in host memory
  std::uint64_t storage_writes = 0;  // write_count() when it was written

  // Throws UsageError if the storage has been overwritten since.
  const Plan& checked() const;
  // Rows on this rank. Throws UsageError where only the device knows.
  std::int64_t total() const;
};

// Number of plans that dispatches of this process have written to this memory of a caller.
std::uint64_t write_count(const void* storage);
void count_write(const void* storage);

// Upper bound of the rows that a call with the plan touches: its total where the host knows it.
std::int64_t max_rows_touched(const PyPlan& plan);

}  // namespace ferry::python
