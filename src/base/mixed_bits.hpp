// Mixes the terms of hashes that are sums, whose threads may add in any order.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"

namespace ferry {

// Mixes two numbers so that every bit of either changes the result (the finaliser of SplitMix64).
FERRY_HD std::uint64_t mixed_bits(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = (a + 1) * 0x9e3779b97f4a7c15 + b;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

}  // namespace ferry
