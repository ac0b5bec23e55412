// A message between GPUs: the message of layout/message.hpp, and for each slot how many routes of the same
// rank to the same expert come before it. With that the receiver needs no scan of its own to place a row: the
// first row of (expert, source) plus this number.
#pragma once

#include "layout/message.hpp"

namespace ferry {

struct DeviceMessageLayout {
  MessageLayout base;
  std::int64_t ordinals_offset;  // int32 [K]
  std::int64_t bytes;            // of a message, a multiple of kLine
};

// Rows of staging begin at lines of the memory: a link carries whole lines in one piece each, and parts of
// two lines in two.
inline constexpr std::int64_t kLine = 128;

FERRY_HD constexpr DeviceMessageLayout device_message_layout(const PartList& parts, std::int32_t top_k) {
  DeviceMessageLayout layout{};
  layout.base = message_layout(parts, top_k);
  layout.ordinals_offset = layout.base.weights_offset + 4 * std::int64_t{top_k};
  layout.bytes = (layout.ordinals_offset + 4 * std::int64_t{top_k} + kLine - 1) / kLine * kLine;
  return layout;
}

}  // namespace ferry
