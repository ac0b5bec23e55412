// Copies of bytes, through the cache or past it.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "backends/cpu/kernels/kernels.hpp"
#include "base/host_device.hpp"

namespace ferry::cpu {
namespace {

constexpr std::int64_t kLine = 64;  // bytes of a cache line

FERRY_HD std::int64_t min_of(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}

FERRY_HD void copy_cached(char* out, const char* in, std::int64_t bytes) {
  __builtin_memcpy(out, in, static_cast<std::size_t>(bytes));
}

#if defined(__SSE2__)

// Copies one cache line past the cache. `out` is aligned to a line; `in` may have any alignment.
FERRY_HD void stream_line(char* out, const char* in) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(out), _mm512_loadu_si512(in));
#elif defined(__AVX2__)
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + 32));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(out), a);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(out + 32), b);
#else
  for (int i = 0; i < kLine; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
  }
#endif
}

// Streams whole lines. Lines that are only partly written go through the cache.
void copy_streaming(char* out, const char* in, std::int64_t bytes) {
  const auto misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(out) % kLine);
  const std::int64_t head = min_of(bytes, (kLine - misaligned) % kLine);
  const std::int64_t lines_end = head + (bytes - head) / kLine * kLine;
  copy_cached(out, in, head);
  for (std::int64_t at = head; at < lines_end; at += kLine) stream_line(out + at, in + at);
  copy_cached(out + lines_end, in + lines_end, bytes - lines_end);
}

#else

FERRY_HD void copy_streaming(char* out, const char* in, std::int64_t bytes) {
  copy_cached(out, in, bytes);
}

#endif

FERRY_HD void copy_by(Store store, char* out, const char* in, std::int64_t bytes) {
  if (store == Store::streaming) {
    copy_streaming(out, in, bytes);
  } else {
    copy_cached(out, in, bytes);
  }
}

void copy(void* out, const void* in, std::int64_t bytes, Store store) {
  copy_by(store, static_cast<char*>(out), static_cast<const char*>(in), bytes);
}

// The input is copied in pieces, each small enough to stay in the L1 cache while it is copied to every
// output.
constexpr std::int64_t kPieceBytes = 16 * 1024;

void copy_to_many(void* const* outs, int count, const void* in, std::int64_t bytes, Store store) {
  for (std::int64_t at = 0; at < bytes; at += kPieceBytes) {
    const std::int64_t piece = min_of(kPieceBytes, bytes - at);
    for (int i = 0; i < count; ++i) {
      copy_by(store, static_cast<char*>(outs[i]) + at, static_cast<const char*>(in) + at, piece);
    }
  }
}

void zero(void* out, std::int64_t bytes) {
  __builtin_memset(out, 0, static_cast<std::size_t>(bytes));
}

}  // namespace
}  // namespace ferry::cpu
