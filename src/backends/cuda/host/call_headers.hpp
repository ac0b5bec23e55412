// Call headers (layout/device_signals.hpp) as the host reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "layout/device_signals.hpp"

namespace ferry::cuda {

inline LLPacket header_packet(const std::byte* header, int i) {
  LLPacket packet;
  std::memcpy(&packet, header + i * static_cast<std::int64_t>(sizeof packet), sizeof packet);
  return packet;
}

// Word `i`; 0 if the kernels of the header's call have not written it.
inline std::uint64_t header_word(const std::byte* header, int i) {
  const LLPacket packet = header_packet(header, i);
  return packet.call == header_packet(header, kHeaderFacts).call ? packet.word : 0;
}

// Number `i` among the counts.
inline std::int32_t header_count(const std::byte* header, int i) {
  return static_cast<std::int32_t>(header_word(header, kHeaderCounts + i / 2) >> (32 * (i % 2)));
}

}  // namespace ferry::cuda
