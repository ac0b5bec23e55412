// What a row of a format is made of, and where its parts lie when it has arrived. No other file computes
// these addresses.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/host_device.hpp"
#include "ferry/format.hpp"
#include "format/fp8_block.hpp"

namespace ferry {

// One part of a row. In a message a part is `wire_bytes` of dense bytes. On arrival it lies
//   as rows      row r at r * row_bytes, nothing between rows
//   as columns   element c of row r at (c * leading + r) * element_bytes, leading = leading_dimension(part,
//   capacity)
struct PartLayout {
  std::int64_t wire_bytes = 0;  // of a row in a message: row_bytes padded to 16
  std::int64_t row_bytes = 0;   // of a row on arrival, all elements together
  std::int64_t element_bytes =
      0;  // bytes that stay together on arrival: rows the whole row, columns one element
  bool columns = false;
};

// Values first, then scales; raw parts in the caller's order.
struct PartList {
  int count = 0;
  PartLayout part[kMaxParts] = {};
};

inline constexpr std::int64_t kRowAlignment = 16;  // bytes: parts of a message, rows of values
inline constexpr std::int64_t kScaleBytes = 4;     // an fp32 scale, or a word of packed ones
inline constexpr std::int64_t kMaxPartBytes = 1ll
                                              << 30;  // of a row; keeps every product of sizes within 64 bits
inline constexpr std::int64_t kColumnAlignment = 4;   // elements: columns start at multiples of it

FERRY_HD constexpr std::int64_t padded(std::int64_t bytes) {
  return (bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

// The parts of a row of `hidden` columns. The format must have passed check_format.
PartList parts_of(const Format& format, std::int64_t hidden);

// Refuses, with the numbers: rows that are not a multiple of 16 bytes as they enter or as they arrive, input
// of a type the format does not take, options that exclude each other, raw sizes that are no positive
// multiple of 16. `input` is not looked at for raw formats, nor is `hidden`. Throws UsageError.
void check_format(const Format& format, std::int64_t hidden, DType input);

// Bytes of all parts of a row in a message: parts follow one another, each padded to 16.
FERRY_HD constexpr std::int64_t wire_bytes(const PartList& parts) {
  std::int64_t bytes = 0;
  for (int p = 0; p < parts.count; ++p) bytes += parts.part[p].wire_bytes;
  return bytes;
}

// Elements a row has on arrival.
FERRY_HD constexpr std::int64_t elements_of(const PartLayout& part) {
  return part.row_bytes / part.element_bytes;
}

// Elements from column to column for memory of `capacity` rows (of all experts together); 0 for rows.
FERRY_HD constexpr std::int64_t leading_dimension(const PartLayout& part, std::int64_t capacity) {
  return part.columns ? (capacity + kColumnAlignment - 1) / kColumnAlignment * kColumnAlignment : 0;
}

// Bytes that `capacity` arrived rows of the part take.
FERRY_HD constexpr std::int64_t part_bytes_total(const PartLayout& part, std::int64_t capacity) {
  return part.columns ? part.row_bytes * leading_dimension(part, capacity) : part.row_bytes * capacity;
}

// Where element c of arrived row r begins, in bytes from the part's base. Row parts have one element: the
// row.
FERRY_HD constexpr std::int64_t element_offset(const PartLayout& part, std::int64_t row, std::int64_t element,
                                               std::int64_t leading) {
  return part.columns ? (element * leading + row) * part.element_bytes : row * part.row_bytes;
}

// Places one row of the part, as it lies in a message, at its row. Rows of row parts may as well be copied by
// other means to element_offset(part, row, 0, leading).
FERRY_HD void store_part_row(const PartLayout& part, void* base, std::int64_t row, std::int64_t leading,
                             const void* wire) {
  char* const to = static_cast<char*>(base);
  const char* const from = static_cast<const char*>(wire);
  for (std::int64_t e = 0; e < elements_of(part); ++e)
    std::memcpy(to + element_offset(part, row, e, leading), from + e * part.element_bytes,
                part.element_bytes);
}

// Zeroes one row of the part, nothing else: what zero_padding does to padding rows.
FERRY_HD void zero_part_row(const PartLayout& part, void* base, std::int64_t row, std::int64_t leading) {
  char* const to = static_cast<char*>(base);
  for (std::int64_t e = 0; e < elements_of(part); ++e)
    std::memset(to + element_offset(part, row, e, leading), 0, part.element_bytes);
}

}  // namespace ferry
