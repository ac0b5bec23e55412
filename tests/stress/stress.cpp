// Many calls in a row under random delays: no stale read, no growth, and everything but the call numbers as
// it was.
#include "stress/stress.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backends/cpu/chunk_schedule.hpp"
#include "base/text.hpp"
#include "ferry/ferry.hpp"
#include "group/fault_points.hpp"
#include "seed.hpp"

namespace ferry {
namespace {

constexpr int kHidden = 16, kTokens = 6, kTopK = 3, kExperts = 9;

using test::seed;

// A short delay before some of the stores, flags and polls.
void jitter(FaultPoint, int) {
  thread_local std::mt19937 random(
      static_cast<unsigned>(seed()) +
      static_cast<unsigned>(std::hash<std::thread::id>{}(std::this_thread::get_id())));
  const unsigned draw = random();
  if (draw % 16 == 0) std::this_thread::yield();
  for (unsigned spin = draw % 8 == 1 ? draw / 8 % 400 : 0; spin > 0; --spin)
    std::atomic_signal_fence(std::memory_order_seq_cst);
}

// Says who wrote a value when: four neighbouring columns name one call, rank and token, and no other. Sums of
// K of them are exact in fp32.
float mark(std::uint64_t call, int rank, int token, int column) {
  constexpr std::uint64_t kDigit = 1 << 20;
  const std::uint64_t digits[] = {call % kDigit, call / kDigit, static_cast<std::uint64_t>(rank),
                                  static_cast<std::uint64_t>(token)};
  return static_cast<float>(digits[column % 4] + 1);
}

// One rank's part of the stress: dispatch and combine `calls` times, every value checked.
class Player {
 public:
  Player(Rank rank, Exchange& exchange)
      : rank_(std::move(rank)),
        exchange_(exchange),
        random_(seed() * 1000003 + static_cast<std::uint64_t>(rank_.index())) {}

  // Counts values that are not what this very call wrote.
  std::int64_t play(std::uint64_t call) {
    const int tokens = static_cast<int>(random_() % (kTokens + 1));
    for (int t = 0; t < tokens; ++t) {
      for (int c = 0; c < kHidden; ++c) x_[t * kHidden + c] = mark(call, rank_.index(), t, c);
    }
    for (auto& id : ids_) id = static_cast<std::int32_t>(random_() % kExperts);
    std::fill(std::begin(y_), std::end(y_), -1.0f);
    DispatchResult rows = exchange_.dispatch(Tokens::rows(x_, tokens, DType::fp32), ids_);
    std::int64_t wrong = 0;
    auto* data = static_cast<float*>(rows.data);
    for (int row = 0; row < *rows.total; ++row) {
      const Source& source = rows.source[row];
      for (int c = 0; c < kHidden; ++c)
        wrong += data[row * kHidden + c] != mark(call, source.rank, source.token, c);
    }
    exchange_.combine({.data = rows.data, .type = DType::fp32}, rows.plan, {.data = y_, .type = DType::fp32});
    for (int i = 0; i < tokens * kHidden; ++i)
      wrong += y_[i] != kTopK * mark(call, rank_.index(), i / kHidden, i % kHidden);
    for (int i = tokens * kHidden; i < kTokens * kHidden; ++i) wrong += y_[i] != -1.0f;
    // The lane's arrivals are this rank's until the next dispatch: a row that one leaves out is seen.
    std::fill_n(data, rows.capacity * kHidden, std::numeric_limits<float>::quiet_NaN());
    return wrong;
  }

 private:
  Rank rank_;
  Exchange& exchange_;
  std::mt19937_64 random_;
  alignas(16) float x_[kTokens * kHidden];
  alignas(16) float y_[kTokens * kHidden];
  std::int32_t ids_[kTokens * kTopK];
};

Config config() {
  return {.experts = kExperts,
          .top_k = kTopK,
          .hidden = kHidden,
          .max_tokens = kTokens,
          .repeats = true,
          .format = Format::fp32(),
          .combine_type = DType::fp32};
}

}  // namespace

void stress(int ranks, std::uint64_t calls) {
  set_fault_hook(jitter);
  cpu::chunk_budget = 1;  // a row is a chunk
  std::atomic<std::int64_t> wrong{0};
  Group::threads(ranks).run([&](Rank rank) {
    Exchange exchange(rank, config());
    Player player(rank, exchange);
    for (std::uint64_t call = 0; call < calls; ++call) wrong += player.play(call);
  });
  set_fault_hook(nullptr);
  EXPECT_EQ(wrong, 0) << calls << " calls of " << ranks << " ranks";
}

namespace {

struct Footprint {
  std::int64_t resident_kib = 0;
  std::int64_t descriptors = 0;
  std::int64_t mappings = 0;

  static Footprint now() {
    Footprint footprint;
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmRSS:")) footprint.resident_kib = std::stoll(line.substr(6));
    }
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) ++footprint.mappings;
    auto entries = [](const char* folder) {
      return std::distance(std::filesystem::directory_iterator(folder),
                           std::filesystem::directory_iterator());
    };
    footprint.descriptors = entries("/proc/self/fd");
    return footprint;
  }
};

}  // namespace

void play_without_growth(Rank rank, std::uint64_t calls) {
  Exchange exchange(rank, config());
  Player player(rank, exchange);
  constexpr std::uint64_t kWarm = 500;
  constexpr std::int64_t kSlackKib = 1024;
  constexpr std::int64_t kNoise = 4;  // mappings: the allocator may split or extend its own
  for (std::uint64_t call = 0; call < kWarm; ++call) player.play(call);
  // Each peer is watched through one descriptor, opened at the first long wait: at most ranks of them are no
  // growth. Threads share one footprint, and one that is being taken has an open folder: the first of them
  // takes it alone.
  const bool takes = !rank.same_process() || rank.index() == 0;
  rank.barrier();
  const Footprint before = takes ? Footprint::now() : Footprint{};
  rank.barrier();
  std::int64_t wrong = 0;
  for (std::uint64_t call = kWarm; call < kWarm + calls; ++call) wrong += player.play(call);
  rank.barrier();
  const Footprint after = takes ? Footprint::now() : Footprint{};
  if (wrong > 0) throw std::runtime_error(str(wrong, " wrong values"));
  if (after.resident_kib > before.resident_kib + kSlackKib ||
      after.descriptors > before.descriptors + rank.size() || after.mappings > before.mappings + kNoise) {
    throw std::runtime_error(str("rank ", rank.index(), " grew: resident ", before.resident_kib, " -> ",
                                 after.resident_kib, " KiB, descriptors ", before.descriptors, " -> ",
                                 after.descriptors, ", mappings ", before.mappings, " -> ", after.mappings));
  }
  rank.barrier();
}

}  // namespace ferry
