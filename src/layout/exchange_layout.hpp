// The layout of a rank's symmetric memory, for size queries and for backends.
//
// Each lane has: its signals; two dispatch staging buffers of [R sources, T] messages; two combine staging
// buffers of [T, min(K, R)] rows (partial; with Transfer::gather [T, R]) or [T, K] rows (exact and
// unreduced). Calls alternate between the
// two buffers: call n uses the one of parity n & 1.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "layout/message.hpp"

namespace ferry {

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
