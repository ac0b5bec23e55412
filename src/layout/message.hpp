// One token's message to one rank, between CPU ranks; and one row of combine's staging, for all backends.
//
//   dispatch   | part 0 | part 1 ... | token, position | ids [K] | weights [K] |
//   partial    | values | route values [K] |    a row for each (token, rank)
//   exact      | values | weight, value |       a row for each (token, slot)
//   unreduced  | values | weight, value |       a row for each (token, slot)
//
// Every part is padded to 16 bytes.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "format/parts.hpp"
#include "layout/ll_packet.hpp"

namespace ferry {

// Identifies the message's token at its source rank. `position`: the receiver's index in the token's
// ascending list of destination ranks, which is the index of its row in the source rank's combine staging.
struct MessageHead {
  std::int32_t token;
  std::int32_t position;
};

struct MessageLayout {
  std::int64_t part_offset[kMaxParts];
  std::int64_t head_offset;
  std::int64_t ids_offset;      // int32 [K], global
  std::int64_t weights_offset;  // fp32 [K]
  std::int64_t bytes;           // of a message, a multiple of 16
};

FERRY_HD constexpr MessageLayout message_layout(const PartList& parts, std::int32_t top_k) {
  MessageLayout layout{};
  std::int64_t end = 0;
  for (int p = 0; p < parts.count; ++p) {
    layout.part_offset[p] = end;
    end += parts.part[p].wire_bytes;
  }
  layout.head_offset = end;
  layout.ids_offset = end + static_cast<std::int64_t>(sizeof(MessageHead));
  layout.weights_offset = layout.ids_offset + 4 * std::int64_t{top_k};
  layout.bytes = (layout.weights_offset + 4 * std::int64_t{top_k} + 15) / 16 * 16;
  return layout;
}

// The tail of a row of exact or unreduced.
struct RouteTail {
  float weight;
  float value;
};

struct CombineRowLayout {
  std::int64_t tail_offset;  // partial: fp32 [K]; exact and unreduced: RouteTail
  std::int64_t bytes;
};

// One row size for every reduction, so that one staging buffer serves them all.
FERRY_HD constexpr CombineRowLayout combine_row_layout(DType combine_type, std::int32_t hidden,
                                                       std::int32_t top_k) {
  const std::int64_t values = hidden * (combine_type == DType::fp32 ? 4LL : 2LL);
  const std::int64_t tail = top_k > 1 ? 4LL * top_k : static_cast<std::int64_t>(sizeof(RouteTail));
  return {.tail_offset = values, .bytes = (values + tail + 15) / 16 * 16};
}

// A message between GPUs: the parts of one token's row. The metadata of its slots travels apart from it
// (layout/ll_packet.hpp).

struct DeviceMessageLayout {
  std::int32_t part_offset[kMaxParts];
  std::int32_t bytes;  // a multiple of kLine
};

// Bytes of all parts together, rounded up to lines, fit DeviceMessageLayout's 32-bit offsets.
inline constexpr std::int64_t kMostMessageBytes = std::int64_t{1} << 30;

// Rows of staging begin at cache lines, bytes: a link carries a whole line in one packet, and a row that
// straddles two lines in one more.
inline constexpr std::int64_t kLine = 128;

FERRY_HD constexpr DeviceMessageLayout device_message_layout(const PartList& parts) {
  DeviceMessageLayout layout{};
  std::int64_t end = 0;
  for (int p = 0; p < parts.count; ++p) {
    layout.part_offset[p] = static_cast<std::int32_t>(end);
    end += parts.part[p].wire_bytes;
  }
  layout.bytes = static_cast<std::int32_t>((end + kLine - 1) / kLine * kLine);
  return layout;
}

// Bytes that travel for a message, its slot metadata included.
FERRY_HD constexpr std::int64_t device_message_bytes(const DeviceMessageLayout& layout, std::int32_t top_k) {
  return layout.bytes + static_cast<std::int64_t>(sizeof(LLPacket)) * top_k;
}

// Bytes of a row of combine that ends with a label of eight bytes and is packed with others. Rows of some
// kilobytes begin at a line: the bytes that this adds are fewer than those of the lines that reads and writes
// would share.
constexpr std::int64_t labelled_row_bytes(std::int64_t row_bytes) {
  constexpr std::int64_t kLargeRow = 4096, kLabel = 8;
  const std::int64_t align = row_bytes < kLargeRow ? 16 : kLine;
  return (row_bytes + kLabel + align - 1) / align * align;
}

}  // namespace ferry
