// A message between GPUs: the parts of one token's row. The metadata of its slots travels apart from it
// (layout/slot_metadata.hpp).
#pragma once

#include "base/host_device.hpp"
#include "format/parts.hpp"
#include "layout/ll_packet.hpp"

namespace ferry {

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
