#include "tools/ferry/limits/signals.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "group/futex.hpp"
#include "memory/mapping.hpp"

namespace ferry::app {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBatches = 21;
constexpr int kTurns = 200;  // of a batch
constexpr int kLooks = 4000;

// One rank's side: the flag its peer raises, and where it sleeps. Zero bytes are a fresh one.
struct Side {
  alignas(64) std::atomic<std::uint64_t> flag;
  alignas(64) WakeEvent bell;
};

struct Table {
  Side sides[2];
  double seconds;  // written by rank 0
};

void wait_spinning(const Side& mine, std::uint64_t value) {
  for (int looks = 0; mine.flag.load(std::memory_order_acquire) < value; ++looks) {
    if (looks % kLooks == kLooks - 1) sched_yield();  // the peer may wait for this core
  }
}

void wait_sleeping(Side& mine, std::uint64_t value) {
  while (mine.flag.load(std::memory_order_seq_cst) < value) {
    mine.bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t rings = mine.bell.rings.load(std::memory_order_seq_cst);
    if (mine.flag.load(std::memory_order_seq_cst) < value) futex_wait(mine.bell.rings, rings, 1.0);
    mine.bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void wait(Side& mine, std::uint64_t value, Waiting waiting) {
  if (waiting == Waiting::spinning) return wait_spinning(mine, value);
  wait_sleeping(mine, value);
}

void raise(Side& peer, std::uint64_t value) {
  peer.flag.store(value, std::memory_order_seq_cst);  // as WakeEvent asks for
  peer.bell.ring();
}

// Runs `turn(n)`, n ascending, in batches; the median batch's seconds a turn.
template <class Turn>
double median_of_batches(Turn&& turn) {
  std::vector<double> batches;
  std::uint64_t number = 0;
  for (int batch = 0; batch < kBatches; ++batch) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kTurns; ++i) turn(++number);
    batches.push_back(std::chrono::duration<double>(Clock::now() - start).count() / kTurns);
  }
  std::sort(batches.begin(), batches.end());
  return batches[kBatches / 2];
}

}  // namespace

double measure_flag(Group& group, Waiting waiting) {
  const Mapping memory = Mapping::anonymous_shared(sizeof(Table));
  Table& table = *reinterpret_cast<Table*>(memory.data());
  group.run([&](const Rank& rank) {
    const int me = rank.index();
    rank.barrier();
    const double round_trip = median_of_batches([&](std::uint64_t number) {
      if (me == 0) raise(table.sides[1], number);
      wait(table.sides[me], number, waiting);
      if (me == 1) raise(table.sides[0], number);
    });
    if (me == 0) table.seconds = round_trip / 2;
  });
  return table.seconds;
}

double measure_barrier(Group& group) {
  const Mapping memory = Mapping::anonymous_shared(sizeof(double));
  double& seconds = *reinterpret_cast<double*>(memory.data());
  group.run([&](const Rank& rank) {
    const double one = median_of_batches([&](std::uint64_t) { rank.barrier(); });
    if (rank.index() == 0) seconds = one;
  });
  return seconds;
}

}  // namespace ferry::app
