// How a token's values travel and arrive.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "ferry/types.hpp"

namespace ferry {

enum class FormatKind : int { bf16 = 0, fp16 = 1, fp32 = 2, fp8_e4m3 = 3, raw = 4 };

// Scales of the fp8 format: one for each block of 128 columns of a row.
struct Fp8Options {
  bool column_major = false;  // scales arrive as [blocks, leading dimension] instead of [rows, blocks]
  bool power_of_two = false;  // scale = 2^ceil(log2(s / 448))
  bool packed = false;  // power-of-two scales as biased exponents, four to an int32 (needs power_of_two)

  bool operator==(const Fp8Options&) const = default;
};

// A format is a value: cheap to copy, compared by content, chosen for each dispatch.
struct Format {
  FormatKind kind = FormatKind::bf16;
  Fp8Options fp8{};
  std::array<std::int64_t, kMaxParts> part_bytes{};  // raw: bytes of each part of a row, 0 = no part

  static Format bf16() { return {}; }
  static Format fp16() { return {.kind = FormatKind::fp16}; }
  static Format fp32() { return {.kind = FormatKind::fp32}; }

  // e4m3 values with fp32 scales of 1 x 128 blocks, quantised while dispatching; input bf16, fp16 or fp32.
  static Format fp8_e4m3(Fp8Options options = {}) { return {.kind = FormatKind::fp8_e4m3, .fp8 = options}; }

  // Up to four parts a row that Ferry moves without looking at them, such as values already quantised and
  // their scales. Each is a multiple of 16 bytes.
  static Format raw(std::initializer_list<std::int64_t> bytes);

  bool operator==(const Format&) const = default;
};

// Names: bf16, fp16, fp32; fp8, followed by any of -columns, -pow2, -packed, each at most once (packed needs
// pow2); raw: and one to four sizes in bytes, as in raw:1024+64. to_string writes the options in this
// order; parse_format takes them in any, and throws UsageError for anything else.
std::string to_string(const Format& format);
Format parse_format(const std::string& name);

}  // namespace ferry
