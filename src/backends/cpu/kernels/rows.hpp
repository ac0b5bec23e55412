// The value types of a row: how loops load, convert and store them. Copies of bytes, through the cache or
// past it; conversion of a row to another type, and its multiplication by a weight.
//
// The headers in this folder are compiled once for each instruction set. So all that they define has internal
// linkage or is always inlined, and they call no inline function of the standard library: the linker would
// merge its copies into one, possibly compiled for an instruction set that this processor lacks.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "backends/cpu/kernels/kernels.hpp"
#include "base/host_device.hpp"
#include "ferry/types.hpp"
#include "format/numbers.hpp"

namespace ferry::cpu {
namespace {

// Each type has: Bits, its storage; value(), its value in fp32; round(), the bits of an fp32 result rounded
// to the type; magnitude(), an integer that orders as |value| does, 0 for NaN; value_of_magnitude(), its
// inverse.
struct Bf16 {
  using Bits = std::uint16_t;
  FERRY_HD static float value(Bits bits) { return bf16_value(bits); }
  FERRY_HD static Bits round(float value) { return fp32_to_bf16(value); }
  FERRY_HD static std::int16_t magnitude(Bits bits) {
    const auto positive = static_cast<std::int16_t>(bits & 0x7FFF);
    return positive > 0x7F80 ? std::int16_t{0} : positive;
  }
  FERRY_HD static float value_of_magnitude(std::int16_t magnitude) {
    return bf16_value(static_cast<Bits>(magnitude));
  }
};

struct Fp16 {
  using Bits = std::uint16_t;
  FERRY_HD static float value(Bits bits) { return fp16_value(bits); }
  FERRY_HD static Bits round(float value) { return fp32_to_fp16(value); }
  FERRY_HD static std::int16_t magnitude(Bits bits) {
    const auto positive = static_cast<std::int16_t>(bits & 0x7FFF);
    return positive > 0x7C00 ? std::int16_t{0} : positive;
  }
  FERRY_HD static float value_of_magnitude(std::int16_t magnitude) {
    return fp16_value(static_cast<Bits>(magnitude));
  }
};

struct Fp32 {
  using Bits = std::uint32_t;
  FERRY_HD static float value(Bits bits) { return float_of(bits); }
  FERRY_HD static Bits round(float value) { return bits_of(canonical(value)); }
  FERRY_HD static std::int32_t magnitude(Bits bits) {
    const auto positive = static_cast<std::int32_t>(bits & ~kFp32Sign);
    return positive > kFp32Infinity ? 0 : positive;
  }
  FERRY_HD static float value_of_magnitude(std::int32_t magnitude) {
    return float_of(static_cast<Bits>(magnitude));
  }
};

// Calls use(Bf16{}), use(Fp16{}) or use(Fp32{}).
template <class Use>
FERRY_HD auto with_type(DType type, Use use) {
  switch (type) {
    case DType::bf16:
      return use(Bf16{});
    case DType::fp16:
      return use(Fp16{});
    default:
      return use(Fp32{});
  }
}

// Rows need not be aligned to their type, nor be declared as arrays of it.
template <class Type>
FERRY_HD typename Type::Bits load(const char* row, std::int64_t column) {
  typename Type::Bits bits;
  __builtin_memcpy(&bits, row + column * static_cast<std::int64_t>(sizeof bits), sizeof bits);
  return bits;
}

template <class Type>
FERRY_HD void store(char* row, std::int64_t column, typename Type::Bits bits) {
  __builtin_memcpy(row + column * static_cast<std::int64_t>(sizeof bits), &bits, sizeof bits);
}

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

constexpr std::int64_t kBlock = 512;  // columns; the intermediate results of a block stay in the L1 cache

// Calls write(out, first_column, columns) for each block. `out` is the address for the block's results: in
// the row itself, or a buffer that is then copied there, for a streaming store, or if `write` reads the row
// after it has written to `out`.
template <class Out, class Write>
FERRY_HD void for_blocks(void* row, std::int64_t columns, Store store, Write write, bool reads_row = false) {
  constexpr std::int64_t kBytes = sizeof(typename Out::Bits);
  alignas(kLine) char buffer[kBlock * kBytes];
  char* const out = static_cast<char*>(row);
  for (std::int64_t first = 0; first < columns; first += kBlock) {
    const std::int64_t count = min_of(kBlock, columns - first);
    if (store == Store::streaming || reads_row) {
      write(buffer, first, count);
      copy_by(store, out + first * kBytes, buffer, count * kBytes);
    } else {
      write(out + first * kBytes, first, count);
    }
  }
}

template <class Out, class In>
void convert_block(char* __restrict out, const char* __restrict in, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; ++c) store<Out>(out, c, Out::round(In::value(load<In>(in, c))));
}

template <class Out, class In>
void convert_as(void* out, const void* in, std::int64_t columns, Store store) {
  for_blocks<Out>(out, columns, store, [=](char* block, std::int64_t first, std::int64_t count) {
    convert_block<Out, In>(
        block, static_cast<const char*>(in) + first * static_cast<std::int64_t>(sizeof(typename In::Bits)),
        count);
  });
}

void convert_row(void* out, DType out_type, const void* in, DType in_type, std::int64_t columns,
                 Store store) {
  if (out_type == in_type) return copy(out, in, columns * (in_type == DType::fp32 ? 4 : 2), store);
  with_type(out_type, [=](auto to) {
    with_type(in_type, [=](auto from) { convert_as<decltype(to), decltype(from)>(out, in, columns, store); });
  });
}

template <class Type>
void weigh_block(char* __restrict out, const char* __restrict in, float weight, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; ++c) {
    store<Type>(out, c, Type::round(weight * Type::value(load<Type>(in, c))));
  }
}

template <class Type>
void weigh_as(void* out, const void* in, float weight, std::int64_t columns, Store store) {
  for_blocks<Type>(out, columns, store, [=](char* block, std::int64_t first, std::int64_t count) {
    weigh_block<Type>(
        block, static_cast<const char*>(in) + first * static_cast<std::int64_t>(sizeof(typename Type::Bits)),
        weight, count);
  });
}

void apply_weight(void* out, const void* in, DType type, float weight, std::int64_t columns, Store store) {
  with_type(type, [=](auto value) { weigh_as<decltype(value)>(out, in, weight, columns, store); });
}

}  // namespace

}  // namespace ferry::cpu
