// Random delays inside the protocol: while a Jitter exists, every rank sleeps a little at the protocol's
// fault points, differently in each rank and call. Device backends pass these points inside kernels, so for
// them the calling thread and its stream pause before each operation instead.
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
    set_fault_hook(random_sleep);
  }
  ~Jitter() {
    set_fault_hook(nullptr);
    active = false;
  }
  Jitter(const Jitter&) = delete;
  Jitter& operator=(const Jitter&) = delete;

  // Delays the thread and the stream, if a Jitter exists. Call it before each operation of a device backend.
  static void delay_stream(Stream stream, int rank) {
    if (!active) return;
    random_sleep(FaultPoint::dispatch_begin, rank);
    const std::int64_t pause = draw_pause(FaultPoint::dispatch_posted, rank);
    if (pause > 0) device::delay(stream, pause);
  }

 private:
  // Microseconds.
  static std::int64_t draw_pause(FaultPoint point, int rank) {
    static thread_local std::uint64_t calls = 0;
    Random random =
        Random::of({static_cast<std::uint64_t>(point), static_cast<std::uint64_t>(rank), ++calls});
    return random.chance(0.3) ? random.below(150) : 0;
  }

  static void random_sleep(FaultPoint point, int rank) {
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
  static void delay_stream(Stream, int) {}
};

#endif

}  // namespace ferry::contract
