// The seed of this program's random inputs: FERRY_SEED, or a fresh one, printed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

namespace ferry::report {

inline std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    const char* given = std::getenv("FERRY_SEED");
    std::random_device device;
    const std::uint64_t chosen =
        given ? std::stoull(given) : (static_cast<std::uint64_t>(device()) << 32 | device());
    std::printf("seed %llu (FERRY_SEED repeats it)\n", static_cast<unsigned long long>(chosen));
    return chosen;
  }();
  return seed;
}

}  // namespace ferry::report
