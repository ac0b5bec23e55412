// While it lives, every rank sleeps a little at the points of the protocol, each rank and call differently.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "contract/random.hpp"
#include "core/fault_points.hpp"

namespace ferry::contract {

class Jitter {
 public:
  Jitter() { fault_hook = sleep_a_little; }
  ~Jitter() { fault_hook = nullptr; }
  Jitter(const Jitter&) = delete;
  Jitter& operator=(const Jitter&) = delete;

 private:
  static void sleep_a_little(FaultPoint point, int rank) {
    static thread_local std::uint64_t calls = 0;
    Random random =
        Random::of({static_cast<std::uint64_t>(point), static_cast<std::uint64_t>(rank), ++calls});
    if (random.chance(0.3)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(150)));
  }
};

}  // namespace ferry::contract
