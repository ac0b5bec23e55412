// Times the parts of a call's host work, for bench/deep_ep_calls.py --profile.
#pragma once

#include <chrono>

#include "casters.hpp"

namespace ferry::python {

enum class HostPart { arguments, allocation, streams, waiting, exchange, results };
inline constexpr int kHostParts = 6;

// While measuring is on, adds the time from construction to destruction to the part, less the time of
// PartTimers inside. One thread measures at a time.
class PartTimer {
 public:
  explicit PartTimer(HostPart part) {
    if (measuring) begin(part);
  }
  ~PartTimer() {
    if (began_) end();
  }
  PartTimer(const PartTimer&) = delete;
  PartTimer& operator=(const PartTimer&) = delete;

  static inline bool measuring = false;

 private:
  using Clock = std::chrono::steady_clock;

  void begin(HostPart part);
  void end();

  bool began_ = false;
  HostPart part_{};
  Clock::time_point start_{};
  Clock::duration inside_{};  // time of timers inside this one
  PartTimer* outer_ = nullptr;
};

}  // namespace ferry::python
