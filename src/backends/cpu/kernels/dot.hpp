// The inner product of two rows, in the order kernels.hpp defines.
#pragma once

#include "backends/cpu/kernels/values.hpp"

namespace ferry::cpu {
namespace {

constexpr std::int64_t kDotLanes = 256;
constexpr std::int64_t kDotGroup = 8;

template <class A, class B>
void add_products(float* __restrict lanes, const char* __restrict a, const char* __restrict b,
                  std::int64_t count) {
  for (std::int64_t c = 0; c < count; ++c) {
    lanes[c] = fused_multiply_add(A::value(load<A>(a, c)), B::value(load<B>(b, c)), lanes[c]);
  }
}

float fold(float* lanes) {
  for (std::int64_t half = kDotGroup / 2; half >= 1; half /= 2) {
    for (std::int64_t group = 0; group < kDotLanes; group += kDotGroup) {
      for (std::int64_t i = 0; i < half; ++i) lanes[group + i] += lanes[group + i + half];
    }
  }
  for (std::int64_t half = kDotLanes / 2; half >= kDotGroup; half /= 2) {
    for (std::int64_t first = 0; first < half; first += kDotGroup) lanes[first] += lanes[first + half];
  }
  return lanes[0];
}

template <class A, class B>
float dot_as(const void* a, const void* b, std::int64_t columns) {
  constexpr std::int64_t kBytesA = sizeof(typename A::Bits);
  constexpr std::int64_t kBytesB = sizeof(typename B::Bits);
  alignas(64) float lanes[kDotLanes] = {};
  for (std::int64_t first = 0; first < columns; first += kDotLanes) {
    const std::int64_t left = columns - first;
    add_products<A, B>(lanes, static_cast<const char*>(a) + first * kBytesA,
                       static_cast<const char*>(b) + first * kBytesB, left < kDotLanes ? left : kDotLanes);
  }
  return canonical(fold(lanes));
}

float dot(const void* a, DType a_type, const void* b, DType b_type, std::int64_t columns) {
  return with_type(a_type, [=](auto type_a) {
    return with_type(b_type,
                     [=](auto type_b) { return dot_as<decltype(type_a), decltype(type_b)>(a, b, columns); });
  });
}

}  // namespace
}  // namespace ferry::cpu
