// Where everything lies in a rank's symmetric memory. Size queries and backends use this one source.
//
// For each lane: signals, then two generations of dispatch staging [source rank, T] messages, then two
// generations of combine staging (partial: [T, min(K, R)] rows; exact and unreduced: [T, K] rows).
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
  std::int64_t signal_bytes = 0;       // of one lane
  std::int64_t message_bytes = 0;      // largest message of a dispatch
  std::int64_t combine_row_bytes = 0;  // staging of one generation is combine_rows of them
  std::int64_t combine_rows = 0;
};

struct ExchangeLayout {
  ExchangeShape shape;
  std::int64_t signals;   // bytes of each section of a lane, multiples of kSectionAlign
  std::int64_t dispatch;  // one generation
  std::int64_t combine;   // one generation
  std::int64_t source;    // of messages of one source, one generation

  static constexpr std::int64_t kSectionAlign = 4096;

  FERRY_HD constexpr std::int64_t lane_bytes() const { return signals + 2 * dispatch + 2 * combine; }
  FERRY_HD constexpr std::int64_t bytes() const { return shape.lanes * lane_bytes(); }

  FERRY_HD constexpr std::int64_t signals_of(int lane) const { return lane * lane_bytes(); }
  // First message of source `of_source` on the receiving rank.
  FERRY_HD constexpr std::int64_t messages_of(int lane, int parity, int of_source) const {
    return lane * lane_bytes() + signals + parity * dispatch + of_source * source;
  }
  // First row of combine's staging at home.
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
