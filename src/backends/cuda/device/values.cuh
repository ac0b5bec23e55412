// Converts between fp32 and the types of rows: loads, rounds and stores 16 or 32 bytes at a time.
#pragma once

#include "backends/cuda/device/ptx.cuh"
#include "ferry/types.hpp"
#include "format/numbers.hpp"

namespace ferry::cuda {

template <DType kType>
inline constexpr int kPerAccess = kType == DType::fp32 ? 4 : 8;  // values in 16 bytes

__host__ __device__ constexpr std::int64_t value_bytes(DType type) {
  return type == DType::fp32 ? 4 : 2;
}

// Value `half`, 0 or 1, of a word of two; of a word of fp32, its one value.
template <DType kType>
__device__ __forceinline__ float value_of(std::uint32_t word, int half) {
  if constexpr (kType == DType::fp32) return float_of(word);
  const auto bits = static_cast<std::uint16_t>(half == 0 ? word : word >> 16);
  return kType == DType::bf16 ? bf16_value(bits) : value_of_fp16(bits);
}

template <DType kType>
__device__ __forceinline__ void unpack(const uint4& raw, float (&value)[kPerAccess<kType>]) {
  const std::uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
  if constexpr (kType == DType::fp32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = float_of(word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = value_of<kType>(word[i / 2], i % 2);
  }
}

// Rounds a computed value to `type` and back, as if it had been stored and loaded.
__device__ __forceinline__ float rounded(DType type, float value) {
  switch (type) {
    case DType::bf16:
      return bf16_value(static_cast<std::uint16_t>(two_to_bf16(value, 0)));
    case DType::fp16:
      return value_of_fp16(static_cast<std::uint16_t>(two_to_fp16(value, 0)));
    case DType::fp32:
      break;
  }
  return canonical(value);
}

template <DType kType>
__device__ __forceinline__ std::uint32_t zero_plus_two(std::uint32_t word) {
  return kType == DType::bf16 ? add_bf16x2(word, 0) : add_fp16x2(word, 0);
}

template <DType kType>
__device__ __forceinline__ std::uint32_t pack_two(float low, float high) {
  return kType == DType::bf16 ? two_to_bf16(low, high) : two_to_fp16(low, high);
}

// Packs computed values as they are stored: rounded to the type, NaN canonical.
template <DType kType>
__device__ __forceinline__ uint4 packed(const float (&value)[kPerAccess<kType>]) {
  if constexpr (kType == DType::fp32) {
    return make_uint4(bits_of(canonical(value[0])), bits_of(canonical(value[1])),
                      bits_of(canonical(value[2])), bits_of(canonical(value[3])));
  } else {
    return make_uint4(pack_two<kType>(value[0], value[1]), pack_two<kType>(value[2], value[3]),
                      pack_two<kType>(value[4], value[5]), pack_two<kType>(value[6], value[7]));
  }
}

// 0 + v for the values in 16 bytes: -0 becomes 0, NaN canonical.
template <DType kType>
__device__ __forceinline__ uint4 zero_plus(const uint4& raw) {
  const auto each = [](std::uint32_t word) {
    if constexpr (kType == DType::fp32) {
      return bits_of(canonical(__fadd_rn(float_of(word), 0.0f)));
    } else {
      return zero_plus_two<kType>(word);
    }
  };
  return make_uint4(each(raw.x), each(raw.y), each(raw.z), each(raw.w));
}

// Stores kCount (4 or 8) computed values, rounded to the type, NaN canonical, at column `column` of a row.
template <int kCount>
__device__ __forceinline__ void store_values(DType type, void* row, std::int64_t column,
                                             const float (&value)[kCount]) {
  std::uint32_t word[kCount];
  if (type == DType::fp32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) word[i] = bits_of(canonical(value[i]));
    auto* to = reinterpret_cast<uint4*>(static_cast<float*>(row) + column);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
      to[i] = make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    word[i] = type == DType::bf16 ? pack_two<DType::bf16>(value[2 * i], value[2 * i + 1])
                                  : pack_two<DType::fp16>(value[2 * i], value[2 * i + 1]);
  }
  auto* to = static_cast<std::uint16_t*>(row) + column;
  if constexpr (kCount == 8) {
    *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
  }
}

// Eight values of a row as they lie in memory: 16 bytes, or 32 of fp32.
struct RawEight {
  uint4 low, high;
};

// `column`: a multiple of 8.
__device__ __forceinline__ RawEight load_eight(DType type, const void* row, std::int64_t column) {
  RawEight raw;
  const auto* from =
      reinterpret_cast<const uint4*>(static_cast<const char*>(row) + column * value_bytes(type));
  raw.low = from[0];
  if (type == DType::fp32) raw.high = from[1];
  return raw;
}

__device__ __forceinline__ void unpack(DType type, const RawEight& raw, float (&value)[8]) {
  if (type == DType::fp32) {
    const std::uint32_t word[8] = {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                                   raw.high.x, raw.high.y, raw.high.z, raw.high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = float_of(word[i]);
  } else if (type == DType::bf16) {
    unpack<DType::bf16>(raw.low, value);
  } else {
    unpack<DType::fp16>(raw.low, value);
  }
}

// Loads four values of a row. `column`: a multiple of 4.
__device__ __forceinline__ void load_four(DType type, const void* row, std::int64_t column,
                                          float (&value)[4]) {
  if (type == DType::fp32) {
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const float*>(row) + column);
    unpack<DType::fp32>(raw, value);
    return;
  }
  const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(row) + column);
  const std::uint32_t word[2] = {raw.x, raw.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[i] = type == DType::bf16 ? value_of<DType::bf16>(word[i / 2], i % 2)
                                   : value_of<DType::fp16>(word[i / 2], i % 2);
  }
}

}  // namespace ferry::cuda
