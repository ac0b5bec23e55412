#include "backends/collective/pair_blocks.hpp"

#include <cstring>

namespace ferry::collective {

// When a wait ends, it looks at what has arrived while a thread of the engine may still write it. The bytes
// that it reads decide only the text of an error, so the thread sanitizer is switched off here.
#ifdef __SANITIZE_THREAD__
__attribute__((no_sanitize("thread")))
#endif
std::uint64_t
peek(const std::byte* at) {
  const auto* bytes = reinterpret_cast<const volatile unsigned char*>(at);
  std::uint64_t word = 0;
  for (int i = 7; i >= 0; --i) word = word << 8 | bytes[i];
  return word;
}

std::uint64_t seal_of(const std::byte* header, std::size_t bytes, int from, int to) {
  constexpr std::size_t kWord = sizeof(std::uint64_t), kSealAt = kWord;
  std::uint64_t seal = (static_cast<std::uint64_t>(from) << 32) + static_cast<std::uint64_t>(to) + 1;
  for (std::size_t at = 0; at < bytes; at += kWord) {
    if (at == kSealAt) continue;
    std::uint64_t word = 0;
    std::memcpy(&word, header + at, kWord);
    seal = (seal ^ word) * 0x9E3779B97F4A7C15u + (seal >> 29);
  }
  return seal;
}

}  // namespace ferry::collective
