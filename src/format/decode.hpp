// Reads quantised values of received rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "format/blocks.hpp"
#include "format/encoding.hpp"
#include "format/numbers.hpp"
#include "format/parts.hpp"

namespace ferry {

// The scale of one block of a received row; in a two-level format without g. The scales begin at `scales` and
// have the layout `part`. `row` and `leading` are those of element_offset().
FERRY_HD float received_scale(const Encoding& encoding, const PartLayout& part, const void* scales,
                              std::int64_t leading, std::int64_t row, std::int64_t block) {
  const std::int64_t word = encoding.packs_scales() ? block / 4 : block;
  const std::int64_t offset = part.columns || part.tiles
                                  ? element_offset(part, row, word, leading)
                                  : element_offset(part, row, 0, 0) + kScaleBytes * word;
  std::uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(scales) + offset, sizeof bits);
  if (!encoding.packs_scales()) return float_of(bits);
  const std::uint32_t byte = bits >> (8 * (block % 4)) & 0xFFu;
  return encoding.scale_type == ScaleType::e4m3 ? e4m3_to_fp32(static_cast<std::uint8_t>(byte))
                                                : scale_of_exponent(byte);
}

// The element in a column of a row of quantised values, before it is multiplied by its scale.
FERRY_HD float quantised_element(const Encoding& encoding, const void* values, std::int64_t column) {
  const auto* bytes = static_cast<const std::uint8_t*>(values);
  if (encoding.element == ElementType::e4m3) return e4m3_to_fp32(bytes[column]);
  return e2m1_to_fp32(static_cast<std::uint8_t>(bytes[column / 2] >> (column % 2 * 4) & 0xF));
}

}  // namespace ferry
