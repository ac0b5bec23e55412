// The layout of a rank's symmetric memory, for size queries and for backends.
//
// Each lane has: its signals; two dispatch staging buffers of [R sources, T] messages; two combine staging
// buffers of [T, min(K, R)] rows (partial; with Transfer::gather [T, R]) or [T, K] rows (exact and
// unreduced). Calls alternate between the two buffers: call n uses the one of parity n & 1.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "format/parts.hpp"
#include "layout/device_signals.hpp"

namespace ferry {

// One token's message to one rank, between CPU ranks; and one row of combine's staging, for all backends.
//
//   dispatch   | part 0 | part 1 ... | token, position | ids [K] | weights [K] |
//   partial    | values | route values [K] |    a row for each (token, rank)
//   exact      | values | weight, value |       a row for each (token, slot)
//   unreduced  | values | weight, value |       a row for each (token, slot)
//
// Every part is padded to 16 bytes.

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
// (layout/device_signals.hpp).

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

struct ExchangeShape {
  std::int32_t ranks = 0;
  std::int32_t top_k = 0;
  std::int32_t max_tokens = 0;
  std::int32_t lanes = 1;
  std::int64_t signal_bytes = 0;   // of one lane
  std::int64_t message_bytes = 0;  // largest message of a dispatch
  std::int64_t combine_row_bytes = 0;
  std::int64_t combine_rows = 0;  // of one combine staging buffer
};

struct ExchangeLayout {
  ExchangeShape shape;
  // Bytes; the first three are multiples of kSectionAlign.
  std::int64_t signals;
  std::int64_t dispatch;  // one dispatch staging buffer
  std::int64_t combine;   // one combine staging buffer
  std::int64_t source;    // one source's messages in a dispatch staging buffer

  static constexpr std::int64_t kSectionAlign = 4096;

  FERRY_HD constexpr std::int64_t lane_bytes() const { return signals + 2 * dispatch + 2 * combine; }
  FERRY_HD constexpr std::int64_t bytes() const { return shape.lanes * lane_bytes(); }

  FERRY_HD constexpr std::int64_t signals_of(int lane) const { return lane * lane_bytes(); }
  // First message of source `of_source` on the receiving rank.
  FERRY_HD constexpr std::int64_t messages_of(int lane, int parity, int of_source) const {
    return lane * lane_bytes() + signals + parity * dispatch + of_source * source;
  }
  // First row of a combine staging buffer.
  FERRY_HD constexpr std::int64_t combine_of(int lane, int parity) const {
    return lane * lane_bytes() + signals + 2 * dispatch + parity * combine;
  }
};

FERRY_HD constexpr ExchangeLayout exchange_layout(const ExchangeShape& shape) {
  auto section = [](std::int64_t bytes) {
    constexpr std::int64_t align = ExchangeLayout::kSectionAlign;
    return (bytes + align - 1) / align * align;
  };
  return {.shape = shape,
          .signals = section(shape.signal_bytes),
          .dispatch = section(std::int64_t{shape.ranks} * shape.max_tokens * shape.message_bytes),
          .combine = section(shape.combine_rows * shape.combine_row_bytes),
          .source = shape.max_tokens * shape.message_bytes};
}

}  // namespace ferry
