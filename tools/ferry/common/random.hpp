// Pseudo-random numbers that are a function of their position, so that any rank can compute any token again.
#pragma once

#include <cstdint>

namespace ferry::app {

// The output function of splitmix64 (Steele, Lea, Flood 2014).
constexpr std::uint64_t mix(std::uint64_t z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

template <class... Words>
constexpr std::uint64_t key_of(Words... words) {
  std::uint64_t key = 0;
  ((key = mix(key ^ static_cast<std::uint64_t>(words))), ...);
  return key;
}

// Uniform in [-1, 1), a multiple of 2^-23. Numbers 2n and 2n + 1 come from one 64-bit draw.
constexpr float value_at(std::uint64_t key, std::uint64_t number) {
  const std::uint64_t bits = mix(key + number / 2 * 0x9e3779b97f4a7c15u);
  const auto half = static_cast<std::uint32_t>(number % 2 == 0 ? bits : bits >> 32);
  return static_cast<float>(static_cast<std::int32_t>(half) >> 8) * 0x1p-23f;
}

}  // namespace ferry::app
