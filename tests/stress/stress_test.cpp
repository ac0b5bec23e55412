// Stress tests: many calls in a row under random delays, with every value checked. Compiled a second time
// with FERRY_TEST_LONG, for more calls.
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

#include "base/text.hpp"
#include "ferry/ferry.hpp"
#include "group/fault_points.hpp"
#include "group/rank_state.hpp"
#include "own_shared_folder.hpp"
#include "seed.hpp"

namespace ferry {
namespace {

constexpr int kHidden = 16, kTokens = 6, kTopK = 3, kExperts = 9;

using test::seed;

// A fault hook that delays some stores, flags and polls briefly.
void delay_randomly(FaultPoint, int) {
  thread_local std::mt19937 random(
      static_cast<unsigned>(seed()) +
      static_cast<unsigned>(std::hash<std::thread::id>{}(std::this_thread::get_id())));
  const unsigned draw = random();
  if (draw % 16 == 0) std::this_thread::yield();
  for (unsigned spin = draw % 8 == 1 ? draw / 8 % 400 : 0; spin > 0; --spin)
    std::atomic_signal_fence(std::memory_order_seq_cst);
}

// The value of a column, unique to its call, rank and token: four neighbouring columns encode all three. Sums
// of K such values are exact in fp32.
float value_of(std::uint64_t call, int rank, int token, int column) {
  constexpr std::uint64_t kDigit = 1 << 20;
  const std::uint64_t digits[] = {call % kDigit, call / kDigit, static_cast<std::uint64_t>(rank),
                                  static_cast<std::uint64_t>(token)};
  return static_cast<float>(digits[column % 4] + 1);
}

// Runs dispatch and combine on one rank and checks every value.
class CallRunner {
 public:
  CallRunner(Rank rank, Exchange& exchange)
      : rank_(std::move(rank)),
        exchange_(exchange),
        random_(seed() * 1000003 + static_cast<std::uint64_t>(rank_.index())) {}

  // Runs one call of each and returns how many values differ from those that this call wrote.
  std::int64_t run(std::uint64_t call) {
    const int tokens = static_cast<int>(random_() % (kTokens + 1));
    for (int t = 0; t < tokens; ++t) {
      for (int c = 0; c < kHidden; ++c) x_[t * kHidden + c] = value_of(call, rank_.index(), t, c);
    }
    for (auto& id : ids_) id = static_cast<std::int32_t>(random_() % kExperts);
    std::fill(std::begin(y_), std::end(y_), -1.0f);
    DispatchResult rows = exchange_.dispatch(Tokens::rows(x_, tokens, DType::fp32), ids_);
    std::int64_t wrong = 0;
    auto* data = static_cast<float*>(rows.data);
    for (int row = 0; row < *rows.total; ++row) {
      const Source& source = rows.source[row];
      for (int c = 0; c < kHidden; ++c)
        wrong += data[row * kHidden + c] != value_of(call, source.rank, source.token, c);
    }
    exchange_.combine({.data = rows.data, .type = DType::fp32}, rows.plan, {.data = y_, .type = DType::fp32});
    for (int i = 0; i < tokens * kHidden; ++i)
      wrong += y_[i] != kTopK * value_of(call, rank_.index(), i / kHidden, i % kHidden);
    for (int i = tokens * kHidden; i < kTokens * kHidden; ++i) wrong += y_[i] != -1.0f;
    // The received rows belong to this rank until the next dispatch. Overwrites them, so that the check of
    // the next call finds a row that its dispatch did not write.
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

// Runs `calls` dispatches and combines on `ranks` threads, with random delays at every fault point. Fails the
// calling test if a row or a sum holds a value that its own call did not write.
void run_with_random_delays(int ranks, std::uint64_t calls) {
  set_fault_hook(delay_randomly);
  std::atomic<std::int64_t> wrong{0};
  Group::threads(ranks).run([&](Rank rank) {
    rank.state().set_chunk_budget(1);  // chunks of one row
    Exchange exchange(rank, config());
    CallRunner runner(rank, exchange);
    for (std::uint64_t call = 0; call < calls; ++call) wrong += runner.run(call);
  });
  set_fault_hook(nullptr);
  EXPECT_EQ(wrong, 0) << calls << " calls of " << ranks << " ranks";
}

// Resources of this process.
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
    auto count_entries = [](const char* directory) {
      return std::distance(std::filesystem::directory_iterator(directory),
                           std::filesystem::directory_iterator());
    };
    footprint.descriptors = count_entries("/proc/self/fd");
    return footprint;
  }
};

// Collective. Runs `calls` calls and throws if resident memory, descriptors or mappings have grown. Throws on
// the rank that grew, so that it works in forked ranks as well.
void require_no_growth(Rank rank, std::uint64_t calls) {
  Exchange exchange(rank, config());
  CallRunner runner(rank, exchange);
  constexpr std::uint64_t kWarmupCalls = 500;
  constexpr std::int64_t kSlackKib = 1024;
  constexpr std::int64_t kSlackMappings = 4;  // the allocator may split or extend its own
  for (std::uint64_t call = 0; call < kWarmupCalls; ++call) runner.run(call);
  // A rank opens one descriptor (a pidfd) for each peer at the first long wait; these do not count as growth.
  // Threads share one footprint, and measuring it opens a directory, so only rank 0 measures.
  const bool measures = !rank.same_process() || rank.index() == 0;
  rank.barrier();
  const Footprint before = measures ? Footprint::now() : Footprint{};
  rank.barrier();
  std::int64_t wrong = 0;
  for (std::uint64_t call = kWarmupCalls; call < kWarmupCalls + calls; ++call) wrong += runner.run(call);
  rank.barrier();
  const Footprint after = measures ? Footprint::now() : Footprint{};
  if (wrong > 0) throw std::runtime_error(str(wrong, " wrong values"));
  if (after.resident_kib > before.resident_kib + kSlackKib ||
      after.descriptors > before.descriptors + rank.size() ||
      after.mappings > before.mappings + kSlackMappings) {
    throw std::runtime_error(str("rank ", rank.index(), " grew: resident ", before.resident_kib, " -> ",
                                 after.resident_kib, " KiB, descriptors ", before.descriptors, " -> ",
                                 after.descriptors, ", mappings ", before.mappings, " -> ", after.mappings));
  }
  rank.barrier();
}

void expect_no_growth(std::uint64_t calls) {
  const test::OwnSharedFolder folder;
  EXPECT_NO_THROW(Group::threads(4).run([&](Rank rank) { require_no_growth(rank, calls); }));
  EXPECT_NO_THROW(Group::processes(4).run([&](Rank rank) { require_no_growth(rank, calls); }));
  EXPECT_TRUE(folder.empty());
}

#ifdef FERRY_TEST_LONG

TEST(StressLong, OneMillionDelayedCallsReadNothingStale) {
  run_with_random_delays(3, 1000000);
}

TEST(StressLong, HundredThousandCallsLeaveNoGrowth) {
  expect_no_growth(100000);
}

#else

TEST(Stress, DelayedCallsReadNothingStale) {
  for (const int ranks : {2, 3, 4}) run_with_random_delays(ranks, 2000);
}

TEST(Stress, CallsLeaveNoGrowth) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers allocate memory of their own in every call";
#endif
  expect_no_growth(3000);
}

#endif

}  // namespace
}  // namespace ferry
