// A pause in a loop that waits for memory to change.
#pragma once

namespace ferry {

// Lets the processor save power, or run the other thread of its core, for some cycles.
inline void pause_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace ferry
