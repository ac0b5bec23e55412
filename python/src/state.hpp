// What stands behind an exchange of Python, and outlives its destroy() while arrays point into it.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>

#include "arrays/array.hpp"
#include "ferry/exchange.hpp"

namespace ferry::python {

struct LaneState {
  std::atomic<bool> busy = false;        // a thread is inside a call
  std::atomic<std::uint64_t> parity{0};  // of the plan in the lane's own memory
  std::atomic<bool> came = false;        // what the last dispatch brings
};

struct ExchangeState {
  ExchangeState(const Rank& rank, const Config& config, Device device)
      : exchange(rank, config), where(device), lanes(static_cast<std::size_t>(config.lanes)) {}

  Exchange exchange;
  Device where;  // tokens, rows and plans
  std::deque<LaneState> lanes;
  std::atomic<bool> captured = false;  // some call was: numbers of eager calls are no longer the lane's
  std::mutex counting;                 // load counts are handed out by reference
};

using SharedState = std::shared_ptr<ExchangeState>;

// A Python object that keeps the state, for arrays that point into it.
nb::object keeper_of(const SharedState& state);

}  // namespace ferry::python
