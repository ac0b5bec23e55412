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

class Jitter {
 public:
  Jitter() { fault_hook = sleep_a_little; }
  ~Jitter() { fault_hook = nullptr; }
  Jitter(const Jitter&) = delete;
  Jitter& operator=(const Jitter&) = delete;

  // Before an operation of a device backend.
  static void stall(Stream stream, int rank) {
    if (fault_hook.load() != sleep_a_little) return;
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
};

}  // namespace ferry::contract
