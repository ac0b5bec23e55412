// The parts of a row in each format, and where their bytes are in a message and in received memory.
//
// No other file computes these addresses.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/host_device.hpp"
#include "ferry/format.hpp"
#include "format/blocks.hpp"
#include "format/encoding.hpp"
#include "format/numbers.hpp"

namespace ferry {

// One part of a row. In a message a part is `wire_bytes` dense bytes. In received memory it is stored
//   as rows     row r at r * row_bytes
//   as columns  element c of column row r at (c * leading + r) * element_bytes
//   as tiles    element c of tile row r at the offset that tile_element_offset() computes
// with leading = leading_dimension(part, room). column_row() computes the column row of a row. A group's
// tiles start at a tile of their own, so the tile row of a row is 128 * (first tile of its group) + (its
// position in the group).
struct PartLayout {
  std::int64_t wire_bytes = 0;  // of a row in a message: row_bytes padded to 16
  std::int64_t row_bytes = 0;   // of a received row, all elements together
  // Received bytes that are contiguous: of the whole row, or as columns of one element.
  std::int64_t element_bytes = 0;
  bool columns = false;
  bool tiles = false;
};

// Room for received rows: for `rows` of all `groups` together. expert_padded: for `group_rows` of each group,
// which has columns of its own; other layouts: 0, and a column holds the rows of all groups.
struct RowRoom {
  std::int64_t rows = 0, groups = 0, group_rows = 0;
};

// The parts of a row: values, then scales. Raw: in the caller's order.
struct PartList {
  int count = 0;
  PartLayout part[kMaxParts] = {};
};

inline constexpr std::int64_t kRowAlignment = 16;    // bytes: parts of a message, rows of values
inline constexpr std::int64_t kScaleBytes = 4;       // an fp32 scale, or a word of four packed scales
inline constexpr std::int64_t kColumnAlignment = 4;  // elements: columns start at multiples of it
// Tiles of scales: 128 rows x 4 blocks, one byte for each. The four blocks of a row are an element.
inline constexpr std::int64_t kTileRows = 128, kTileBytes = 512;
// Largest part of a row, in bytes. It keeps every product of sizes within 64 bits.
inline constexpr std::int64_t kMaxPartBytes = 1ll << 30;

FERRY_HD constexpr std::int64_t padded(std::int64_t bytes) {
  return (bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

// The parts of a row of `hidden` columns. The format must have passed check_format().
PartList parts_of(const Format& format, std::int64_t hidden);

// The parts of a received row that is encoded with a scale of its expert (DispatchOptions::input_scales): fp8
// has no block scales then.
PartList parts_by_expert(const Format& format, std::int64_t hidden);

// The scales, as tiles, of the format that has the most of them.
PartLayout largest_scale_tiles(std::int64_t hidden);

// The one part of a row of values that travel unquantised.
PartList value_parts(DType type, std::int64_t hidden);

// Throws UsageError for rows that are not a multiple of 16 bytes before or after encoding, for an input type
// that the format does not accept, for options that exclude each other, and for raw sizes that are not
// positive multiples of 16. Raw formats use neither `input` nor `hidden`.
void check_format(const Format& format, std::int64_t hidden, DType input);

// Bytes of all parts of a row in a message, each padded to 16.
FERRY_HD constexpr std::int64_t wire_bytes(const PartList& parts) {
  std::int64_t bytes = 0;
  for (int p = 0; p < parts.count; ++p) bytes += parts.part[p].wire_bytes;
  return bytes;
}

// Elements of a received row; 1 if it is stored as a row.
FERRY_HD constexpr std::int64_t elements_of(const PartLayout& part) {
  return part.row_bytes / part.element_bytes;
}

// Rows that a column has room for, a multiple of kColumnAlignment.
FERRY_HD constexpr std::int64_t column_length(const RowRoom& room) {
  const std::int64_t rows = room.group_rows > 0 ? room.group_rows : room.rows;
  return (rows + kColumnAlignment - 1) / kColumnAlignment * kColumnAlignment;
}

// Elements from one column to the next; 0 if the part is not stored as columns.
FERRY_HD constexpr std::int64_t leading_dimension(const PartLayout& part, const RowRoom& room) {
  return part.columns ? column_length(room) : 0;
}

// Rows of memory that parts stored as columns take: those of the room, and what aligns their columns.
FERRY_HD constexpr std::int64_t aligned_rows(const RowRoom& room) {
  return (room.group_rows > 0 ? room.groups : 1) * column_length(room);
}

// The column row of a row of a part stored as columns; other parts: `row`. A group's columns follow those of
// the group before it. `group_rows`: of RowRoom; the rows of all groups will do as well as 0.
FERRY_HD constexpr std::int64_t column_row(const PartLayout& part, std::int64_t row, std::int64_t group_rows,
                                           std::int64_t leading) {
  if (!part.columns || group_rows == 0) return row;
  // 32 bits, which hold every row, are faster to divide on GPUs. Elements of columns are words of scales.
  const std::int64_t group = static_cast<std::uint32_t>(row) / static_cast<std::uint32_t>(group_rows);
  return group * (part.row_bytes / kScaleBytes * leading - group_rows) + row;
}

// Rows of tiles that a group of `rows` rows fills.
FERRY_HD constexpr std::int64_t row_tiles(std::int64_t rows) {
  return (rows + kTileRows - 1) / kTileRows;
}

// Bytes of a row of tiles: of 128 rows of a part that is stored as tiles.
FERRY_HD constexpr std::int64_t row_tile_bytes(const PartLayout& part) {
  return elements_of(part) * kTileBytes;
}

// Bytes of received memory of the part. Each group may leave a row of tiles partly unused.
FERRY_HD constexpr std::int64_t part_bytes_total(const PartLayout& part, const RowRoom& room) {
  if (part.tiles) return (row_tiles(room.rows) + room.groups) * row_tile_bytes(part);
  return part.row_bytes * (part.columns ? aligned_rows(room) : room.rows);
}

// ReceivedPart::row_bytes of the part.
FERRY_HD constexpr std::int64_t received_row_bytes(const PartLayout& part) {
  if (part.tiles) return row_tile_bytes(part);
  return part.columns ? part.element_bytes : part.row_bytes;
}

// Byte offset of an element of a tile row: 32 lines of 16 bytes, line l with the rows l, l + 32, l + 64 and
// l + 96 of the tile.
FERRY_HD constexpr std::int64_t tile_element_offset(const PartLayout& part, std::int64_t row,
                                                    std::int64_t element) {
  const std::int64_t tile = row / kTileRows * elements_of(part) + element;
  return tile * kTileBytes + row % 32 * 16 + row % kTileRows / 32 * 4;
}

// Byte offset of an element of a received row from the part's base. `row`: columns: the column row; tiles:
// the tile row.
FERRY_HD constexpr std::int64_t element_offset(const PartLayout& part, std::int64_t row, std::int64_t element,
                                               std::int64_t leading) {
  if (part.tiles) return tile_element_offset(part, row, element);
  return part.columns ? (element * leading + row) * part.element_bytes : row * part.row_bytes;
}

// Copies one row of the part from `message_part`, its place in a message, to its row in received memory;
// `row` as in element_offset(). A part that is stored as rows may also be copied by other means to
// element_offset(part, row, 0, leading).
FERRY_HD void store_part_row(const PartLayout& part, void* base, std::int64_t row, std::int64_t leading,
                             const void* message_part) {
  char* const to = static_cast<char*>(base);
  const char* const from = static_cast<const char*>(message_part);
  for (std::int64_t e = 0; e < elements_of(part); ++e)
    std::memcpy(to + element_offset(part, row, e, leading), from + e * part.element_bytes,
                part.element_bytes);
}

// Zeroes one row of the part, and nothing else: for padding rows with zero_padding. `row` as in
// element_offset().
FERRY_HD void zero_part_row(const PartLayout& part, void* base, std::int64_t row, std::int64_t leading) {
  char* const to = static_cast<char*>(base);
  for (std::int64_t e = 0; e < elements_of(part); ++e)
    std::memset(to + element_offset(part, row, e, leading), 0, part.element_bytes);
}

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
