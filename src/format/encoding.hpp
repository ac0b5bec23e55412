// The facts of a format that determine everything else: sizes of rows, messages and staging, and the encoder
// that runs on the host and in kernels.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/host_device.hpp"
#include "ferry/format.hpp"

namespace ferry {

// Type of a received value. `bytes`: opaque to Ferry.
enum class ElementType : std::uint8_t { bf16, fp16, fp32, e4m3, e2m1, bytes };

// How the scale of a block follows from its values; the formulas are in docs/formats.md.
// `none`: values are moved, not quantised.
enum class ScaleRule : std::uint8_t { none, quotient, power_of_two, mx_up, mx_ocp, two_level };

// How a scale is stored: as fp32, or in a byte, four to an int32: the biased exponent of a power of two, or
// e4m3.
enum class ScaleType : std::uint8_t { fp32, exponent, e4m3 };

struct Encoding {
  ElementType element = ElementType::bf16;
  ScaleRule rule = ScaleRule::none;
  ScaleType scale_type = ScaleType::fp32;
  bool by_caller = false;      // the caller's encoder writes the rows, which are bytes here
  bool row_scale = false;      // a further fp32 scale for each row, a part of its own
  bool scale_columns = false;  // scales are [blocks, leading dimension] instead of [rows, blocks]
  bool scale_tiles = false;    // scales are in tiles of 128 rows x 4 blocks
  std::int16_t block = 0;      // columns of a row that share a scale; 0: no scales

  FERRY_HD constexpr bool quantises() const { return rule != ScaleRule::none; }
  FERRY_HD constexpr bool packs_scales() const { return scale_type != ScaleType::fp32; }
  FERRY_HD constexpr bool is_mx() const { return rule == ScaleRule::mx_up || rule == ScaleRule::mx_ocp; }
  // Two levels: a value is its element times the scale of its block times g, one fp32 of the call or the row.
  FERRY_HD constexpr bool is_two_level() const { return rule == ScaleRule::two_level; }
  // Whether a call takes a scale for all its rows.
  FERRY_HD constexpr bool takes_global_scale() const { return is_two_level() && !row_scale; }
  // Whether rows can be encoded where they arrive, with the scales of their experts.
  FERRY_HD constexpr bool takes_input_scales() const {
    const bool plain = rule == ScaleRule::quotient && !scale_columns;
    return element == ElementType::e4m3 ? plain || is_mx() : takes_global_scale();
  }
  // Whether an invalid scale is stored as 7F, the NaN of e4m3: other types have every scale.
  FERRY_HD constexpr bool marks_bad_scales() const { return scale_type == ScaleType::e4m3; }
  // A format of blocks of 16 or 32 columns, whose scales are bytes.
  FERRY_HD constexpr bool is_microscaled() const { return is_mx() || is_two_level(); }

  // Scales of a row of `columns`.
  FERRY_HD constexpr std::int64_t blocks(std::int64_t columns) const { return (columns + block - 1) / block; }
  // Bytes of the scales of a row's first `columns`, padded to whole words.
  FERRY_HD constexpr std::int64_t scale_bytes(std::int64_t columns) const {
    return packs_scales() ? (blocks(columns) + 3) / 4 * 4 : 4 * blocks(columns);
  }
  // Bytes of the values of `columns`, which fill whole bytes.
  FERRY_HD constexpr std::int64_t value_bytes(std::int64_t columns) const;
};

// `format` has passed check_format().
Encoding encoding_of(const Format& format);

// The last enumerator: kinds from bf16 to it are known.
inline constexpr FormatKind kLastFormatKind = FormatKind::registered;

// The format's name without its options.
const char* to_string(FormatKind kind);

// Bits of one value; 0 for bytes, whose number the format gives.
FERRY_HD constexpr int bits_of(ElementType element) {
  switch (element) {
    case ElementType::fp32:
      return 32;
    case ElementType::bf16:
    case ElementType::fp16:
      return 16;
    case ElementType::e4m3:
      return 8;
    case ElementType::e2m1:
      return 4;
    case ElementType::bytes:
      break;
  }
  return 0;
}

FERRY_HD constexpr std::int64_t Encoding::value_bytes(std::int64_t columns) const {
  return columns * bits_of(element) / 8;
}

// The type of the API that has the element's bits, if there is one.
constexpr std::optional<DType> dtype_of(ElementType element) {
  switch (element) {
    case ElementType::bf16:
      return DType::bf16;
    case ElementType::fp16:
      return DType::fp16;
    case ElementType::fp32:
      return DType::fp32;
    case ElementType::e4m3:
    case ElementType::e2m1:
    case ElementType::bytes:
      break;
  }
  return std::nullopt;
}

// The options of all formats as bits: which of them a kind takes, how they are named, and where Format has
// them.
using OptionBits = std::uint32_t;
inline constexpr OptionBits kScaleColumns = 1, kPowerOfTwo = 2, kPackedScales = 4, kMxUp = 8, kMxOcp = 16,
                            kPerToken = 32, kScaleTiles = 64;
inline constexpr OptionBits kMxRules = kMxUp | kMxOcp, kScaleLayouts = kScaleColumns | kScaleTiles;

// The options that formats of the kind take.
OptionBits options_taken_by(FormatKind kind);
// The rule that a format of the kind has if none is given; 0 for a kind without rules.
OptionBits usual_rule(FormatKind kind);

// The options of a format, its rule among them.
OptionBits options_of(const Format& format);
// A format of the kind with options that it takes. Raw and registered formats have none.
Format format_with(FormatKind kind, OptionBits options);

// An option as it is written in a format's name, in the order of to_string().
struct OptionWord {
  OptionBits option;
  std::string_view word;
};
std::span<const OptionWord> option_words();

}  // namespace ferry
