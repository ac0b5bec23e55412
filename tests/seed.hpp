// The seed of a test program's random inputs.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace ferry::test {

// FERRY_SEED, or a fresh one.
inline std::uint64_t draw_seed() {
  const char* given = std::getenv("FERRY_SEED");
  std::random_device device;
  return given != nullptr ? std::strtoull(given, nullptr, 0)
                          : static_cast<std::uint64_t>(device()) << 32 | device();
}

// The seed of this process, drawn and printed once. Ask before ranks are forked: they share what was drawn by
// then.
inline std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const std::uint64_t chosen = draw_seed();
    std::cout << "FERRY_SEED=" << chosen << std::endl;
    return chosen;
  }();
  return value;
}

}  // namespace ferry::test
