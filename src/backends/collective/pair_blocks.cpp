#include "backends/collective/pair_blocks.hpp"

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

}  // namespace ferry::collective
