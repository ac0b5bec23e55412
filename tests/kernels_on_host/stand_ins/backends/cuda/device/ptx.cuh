// Stands in for src/backends/cuda/device/ptx.cuh where a fiber is a thread.
#pragma once

#include <bit>

#include "format/numbers.hpp"
#include "kernels_on_host/cuda_on_grid.hpp"
#define FERRY_CLOCK_OF_FIBERS
#include "protocol/on_host/ptx_functions.hpp"

namespace ferry::cuda {

// Time is turns, so that a busy machine makes no wait longer.
inline std::uint64_t global_nanoseconds() {
  return on_host::Grid::nanoseconds();
}

inline std::uint32_t two_to_bf16(float low, float high) {
  return fp32_to_bf16(low) | std::uint32_t{fp32_to_bf16(high)} << 16;
}
inline std::uint32_t two_to_fp16(float low, float high) {
  return fp32_to_fp16(low) | std::uint32_t{fp32_to_fp16(high)} << 16;
}
inline float value_of_fp16(std::uint16_t bits) {
  return fp16_value(bits);
}
inline std::uint32_t two_to_e4m3(float low, float high) {
  return fp32_to_e4m3(low) | std::uint32_t{fp32_to_e4m3(high)} << 8;
}

inline float value_of_e4m3(std::uint8_t bits) {
  return e4m3_to_fp32(bits);
}
template <std::uint32_t kSelector>
std::uint32_t signs_of_bytes(std::uint32_t low, std::uint32_t high) {
  return (__byte_perm(low, high, kSelector) >> 7 & 0x01010101) * 0xFF;
}

// Applies `each` to the values of both halves. A NaN is canonical: each half is rounded anew.
template <class Each>
std::uint32_t with_bf16x2(std::uint32_t a, std::uint32_t b, Each each) {
  const auto value = [](std::uint32_t word, int half) {
    return bf16_value(static_cast<std::uint16_t>(word >> (16 * half)));
  };
  return two_to_bf16(each(value(a, 0), value(b, 0)), each(value(a, 1), value(b, 1)));
}
template <class Each>
std::uint32_t with_fp16x2(std::uint32_t a, std::uint32_t b, Each each) {
  const auto value = [](std::uint32_t word, int half) {
    return value_of_fp16(static_cast<std::uint16_t>(word >> (16 * half)));
  };
  return two_to_fp16(each(value(a, 0), value(b, 0)), each(value(a, 1), value(b, 1)));
}
// With the sign that the instruction gives: the product of both.
inline float max_magnitude_with_sign(float x, float y) {
  // As the instruction, and unlike std::fmax, ignores a signalling NaN too.
  const float a = std::fabs(x), b = std::fabs(y);
  const float larger = std::isnan(a) || a < b ? b : a;
  return std::signbit(x) != std::signbit(y) ? -larger : larger;
}
inline std::uint32_t max_magnitude_bf16x2(std::uint32_t a, std::uint32_t b) {
  return with_bf16x2(a, b, max_magnitude_with_sign);
}
inline std::uint32_t max_magnitude_fp16x2(std::uint32_t a, std::uint32_t b) {
  return with_fp16x2(a, b, max_magnitude_with_sign);
}
inline std::uint32_t min_fp16x2(std::uint32_t a, std::uint32_t b) {
  return with_fp16x2(a, b, [](float x, float y) { return std::fmin(x, y); });
}
inline std::uint32_t add_bf16x2(std::uint32_t a, std::uint32_t b) {
  return with_bf16x2(a, b, [](float x, float y) { return x + y; });
}
inline std::uint32_t add_fp16x2(std::uint32_t a, std::uint32_t b) {
  return with_fp16x2(a, b, [](float x, float y) { return x + y; });
}

inline std::uint64_t load_argument_word(const std::uint64_t* word) {
  return *word;
}
inline void add_in_block(std::int32_t* word, std::int32_t value) {
  *word += value;
}

inline on_host::AsyncLoads& async_loads() {
  return on_host::Grid::block().async_loads[on_host::Grid::thread()];
}
inline void load_async(void* shared, const void* from) {
  async_loads().load(shared, from);
}
inline void commit_async() {
  async_loads().commit();
}
template <int kLatest>
void wait_async_but() {
  async_loads().wait_but(kLatest);
}

inline void sync_threads_of(int barrier, int threads) {
  on_host::Grid::block().barrier_of(barrier, static_cast<unsigned>(threads)).wait(true);
}

}  // namespace ferry::cuda
