// The dot product of two rows, with its additions in the order that kernels.hpp defines.
#pragma once

#include "backends/cpu/kernels/values.hpp"

namespace ferry::cpu {
namespace {

constexpr std::int64_t kDotSums = 256;
constexpr std::int64_t kDotGroup = 8;

template <class A, class B>
void add_products(float* __restrict sums, const char* __restrict a, const char* __restrict b,
                  std::int64_t count) {
  for (std::int64_t c = 0; c < count; ++c) {
    sums[c] = fused_multiply_add(A::value(load<A>(a, c)), B::value(load<B>(b, c)), sums[c]);
  }
}

// Adds the 256 partial sums in the fixed order.
float reduce(float* sums) {
  for (std::int64_t distance = kDotGroup / 2; distance >= 1; distance /= 2) {
    for (std::int64_t group = 0; group < kDotSums; group += kDotGroup) {
      for (std::int64_t i = 0; i < distance; ++i) sums[group + i] += sums[group + i + distance];
    }
  }
  for (std::int64_t distance = kDotSums / 2; distance >= kDotGroup; distance /= 2) {
    for (std::int64_t first = 0; first < distance; first += kDotGroup) sums[first] += sums[first + distance];
  }
  return sums[0];
}

template <class A, class B>
float dot_as(const void* a, const void* b, std::int64_t columns) {
  constexpr std::int64_t kBytesA = sizeof(typename A::Bits);
  constexpr std::int64_t kBytesB = sizeof(typename B::Bits);
  alignas(64) float sums[kDotSums] = {};
  for (std::int64_t first = 0; first < columns; first += kDotSums) {
    const std::int64_t left = columns - first;
    add_products<A, B>(sums, static_cast<const char*>(a) + first * kBytesA,
                       static_cast<const char*>(b) + first * kBytesB, left < kDotSums ? left : kDotSums);
  }
  return canonical(reduce(sums));
}

float dot(const void* a, DType a_type, const void* b, DType b_type, std::int64_t columns) {
  return with_type(a_type, [=](auto type_a) {
    return with_type(b_type,
                     [=](auto type_b) { return dot_as<decltype(type_a), decltype(type_b)>(a, b, columns); });
  });
}

}  // namespace
}  // namespace ferry::cpu
