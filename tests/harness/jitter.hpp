// While it lives, every rank sleeps a little at the points of the protocol, each rank and call differently.
// Device backends pass those points inside their kernels: there the calling thread and its stream pause
// before each operation.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "group/fault_points.hpp"
#include "harness/device.hpp"
#include "harness/random.hpp"

namespace ferry::contract {

#ifdef FERRY_TEST_HOOKS

class Jitter {
 public:
  static constexpr bool kAvailable = true;

  Jitter() {
    active = true;
    set_fault_hook(sleep_a_little);
  }
  ~Jitter() {
    set_fault_hook(nullptr);
    active = false;
  }
  Jitter(const Jitter&) = delete;
  Jitter& operator=(const Jitter&) = delete;

  // Before an operation of a device backend.
  static void stall(Stream stream, int rank) {
    if (!active) return;
    sleep_a_little(FaultPoint::dispatch_begin, rank);
    const std::int64_t pause = draw_pause(FaultPoint::dispatch_posted, rank);
    if (pause > 0) device::stall(stream, pause);
  }

 private:
  static std::int64_t draw_pause(FaultPoint point, int rank) {
    static thread_local std::uint64_t calls = 0;
    Random random =
        Random::of({static_cast<std::uint64_t>(point), static_cast<std::uint64_t>(rank), ++calls});
    return random.chance(0.3) ? random.below(150) : 0;
  }

  static void sleep_a_little(FaultPoint point, int rank) {
    const std::int64_t pause = draw_pause(point, rank);
    if (pause > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause));
  }

  static inline bool active = false;  // set while no rank runs
};

#else

// A production build has no points to sleep at: tests that are about delays skip themselves there.
struct Jitter {
  static constexpr bool kAvailable = false;
  Jitter() {}  // not trivial: a variable of it counts as used
  static void stall(Stream, int) {}
};

#endif

}  // namespace ferry::contract
