// Sleeping until a peer writes, in shared memory.
#pragma once

#include <atomic>
#include <cstdint>

namespace ferry {

// Sleeps while `word` holds `value`, at most `seconds`. May wake for no reason.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t value, double seconds) noexcept;
void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept;

// One rank's place to sleep. A waiter registers, reads `rings`, looks at its flag, and sleeps on the value it
// read; a peer stores the flag, then rings. No wake-up is lost: registering, the two looks and the flag's
// store are sequentially consistent, so either the waiter sees the flag or the peer sees the waiter. Zero
// bytes are a fresh one.
struct alignas(64) WakeEvent {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;

  void ring() noexcept {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(rings);
  }
};

}  // namespace ferry
