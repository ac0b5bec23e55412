// The Python class Plan: a plan with the array that holds it; and the C++ state behind a Python Exchange.
#pragma once

#include <atomic>
#include <deque>
#include <memory>

#include "arrays/array.hpp"
#include "ferry/exchange.hpp"
#include "ferry/plan.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::python {

struct LaneStatus {
  std::atomic<bool> busy = false;              // a thread is inside a call of the lane
  std::atomic<std::uint64_t> plan_version{0};  // number of plans written to the lane's own memory
};

// Outlives Exchange.destroy() while arrays still point into it.
struct ExchangeState {
  ExchangeState(const Rank& rank, const Config& config, Device where)
      : exchange(rank, config), device(where), lanes(static_cast<std::size_t>(config.lanes)) {}

  Exchange exchange;
  Device device;  // where tokens, rows and plans live
  std::deque<LaneStatus> lanes;
  // Some call was captured into a CUDA graph. Replays advance the lane's call number without the host, so the
  // numbers of later eager calls no longer match.
  std::atomic<bool> captured = false;
};

using SharedState = std::shared_ptr<ExchangeState>;

// A Python object that keeps the state alive: the owner of arrays that point into it.
nb::object owner_of(const SharedState& state);

struct PyPlan {
  Plan plan;
  nb::object owner{};  // keeps the storage alive
  Framework framework = Framework::numpy;
  Device device = kHost;
  PlanShape shape{};
  std::int64_t tokens = 0;        // N of this rank; experts in slices: the tokens of its slice
  std::int64_t known_total = -1;  // plans in device memory: the total, once the host has read it
  std::int64_t row_bound = -1;    // set_row_bound(); -1: the capacity
  // Experts in slices, where a plan is that of the routes before the gather; else -1.
  std::int64_t all_tokens = -1;      // N, of which `tokens` are the slice
  std::int64_t gathered_total = -1;  // rows on this rank after the gather

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
  // Tokens of a combine's result.
  std::int64_t result_tokens() const { return all_tokens >= 0 ? all_tokens : tokens; }
};

// Number of plans that dispatches of this process have written to this memory of a caller.
std::uint64_t write_count(const void* storage);
void count_write(const void* storage);

// Upper bound of the rows that a call with the plan touches: its total where the host knows it.
std::int64_t max_rows_touched(const PyPlan& plan);

}  // namespace ferry::python
