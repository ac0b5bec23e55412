#include "backends/collective/pair_blocks.hpp"

#include "base/text.hpp"

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

namespace {

constexpr std::size_t kSealedWord = sizeof(std::uint64_t);

std::uint64_t mix_seal(std::uint64_t seal, const std::byte* from) {
  std::uint64_t word = 0;
  std::memcpy(&word, from, sizeof word);
  return (seal ^ word) * 0x9E3779B97F4A7C15u + (seal >> 29);
}

}  // namespace

std::uint64_t seal_of(const std::byte* header, std::size_t bytes, int from, int to) {
  constexpr std::size_t kSealAt = kSealedWord;
  std::uint64_t seal = (static_cast<std::uint64_t>(from) << 32) + static_cast<std::uint64_t>(to) + 1;
  for (std::size_t at = 0; at < bytes; at += kSealedWord) {
    if (at != kSealAt) seal = mix_seal(seal, header + at);
  }
  return seal;
}

// Four seals take turns, because each word waits for the multiplication of the one before.
std::uint64_t seal_of_content(const std::byte* content, std::int64_t bytes, std::uint64_t header) {
  std::array<std::uint64_t, 4> seals{header, header + 1, header + 2, header + 3};
  const auto words = static_cast<std::size_t>(bytes) / kSealedWord;
  for (std::size_t i = 0; i < words; ++i) seals[i % 4] = mix_seal(seals[i % 4], content + i * kSealedWord);
  std::uint64_t seal = header;
  for (const std::uint64_t each : seals) seal = (seal ^ each) * 0xA54FF53A5F1D36F1u + (seal >> 29);
  return seal;
}

std::string transfer_fault(int peer, bool arrived, const std::string& what) {
  if (!arrived) return str("all_to_all_v returned before the bytes of rank ", peer, " had arrived: ", what);
  return str("all_to_all_v returned other bytes than rank ", peer, " has sent: ", what);
}

std::string counts_fault(int peer) {
  return transfer_fault(peer, true, "its counts of messages do not fit together");
}

// The limit keeps the sums of offsets from overflowing.
std::string fault_of(const FollowingMessages& messages, int peer) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 48;
  const auto& [bytes, message_bytes, round_bytes, rounds] = messages;
  if (bytes == 0 && rounds == 0) return {};  // a call without messages
  if (bytes >= 0 && bytes <= kMostBytes && message_bytes > 0 && round_bytes > 0 && rounds > 0 &&
      (bytes - 1) / round_bytes < rounds)
    return {};
  return counts_fault(peer);
}

}  // namespace ferry::collective
