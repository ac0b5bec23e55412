// The C++ state behind a Python Exchange. It outlives Exchange.destroy() while arrays still point into it.
#pragma once

#include <atomic>
#include <deque>

#include "arrays/array.hpp"
#include "ferry/exchange.hpp"

namespace ferry::python {

struct LaneStatus {
  std::atomic<bool> busy = false;              // a thread is inside a call of the lane
  std::atomic<std::uint64_t> plan_version{0};  // number of plans written to the lane's own memory
};

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

}  // namespace ferry::python
