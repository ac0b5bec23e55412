// How a rank sleeps in shared memory until a peer writes: a futex and a lost-wake-up-free event on top of it.
#pragma once

#include <atomic>
#include <cstdint>

namespace ferry {

// Sleeps while `word` holds `value`, for at most `seconds`. Spurious wake-ups are possible.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t value, double seconds) noexcept;
void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept;

// Wakes the sleeping threads of one rank. Zero bytes are a valid initial state.
//
// The waiter increments `sleepers`, loads `rings`, checks its flag, and sleeps while `rings` keeps the loaded
// value. The peer stores the flag, then calls ring(), which loads `sleepers`. No wake-up is lost: the
// increment, the load of `rings`, the check of the flag, the flag's store and the load of `sleepers` are all
// sequentially consistent, so either the waiter sees the flag or the peer sees the waiter.
struct alignas(64) WakeEvent {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;

  void ring() noexcept {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(rings);
  }

  // The waiter's part: sleeps for at most `seconds`, but not if ready(), which must not throw, returns true.
  template <class Ready>
  void sleep_unless(const Ready& ready, double seconds) noexcept {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t loaded = rings.load(std::memory_order_seq_cst);
    if (!ready()) futex_wait(rings, loaded, seconds);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

}  // namespace ferry
