// Protocol code of the kernels, compiled for the host: records, aborts and waits of several blocks at once.
//
// Some tests run one block between two accesses of another, at every access in turn. The others use threads,
// for the thread sanitizer.
#include "backends/cuda/device/ptx.cuh"  // before the kernels' code: the stand-in for the host
//
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <vector>

#include "backends/cuda/host/diagnostics_reader.hpp"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/flag_publisher.cuh"
#include "group/control_block.hpp"

namespace ferry::cuda {
namespace {

constexpr std::uint64_t kCall = 7;
constexpr std::uint64_t kNoDeadline = ~0ull;

// State that the lanes of a rank's exchange share, and the rank's memory.
struct Exchange {
  HostSignals report{};
  Epoch epoch{.number = kFirstEpoch, .row_order_hash = 0, .placement_version = 0};
  unsigned timeout_claimed = 0;
  alignas(16) std::array<std::byte, 1 << 16> memory{};
};

struct DeviceLane {
  explicit DeviceLane(Exchange& exchange) {
    view.ranks = 1;
    view.deadline = kNoDeadline;
    view.symmetric[0] = exchange.memory.data();
    view.signals = DeviceSignals::of({1, 2, 4, 2, 8, 64});
    view.state = &state;
    view.epoch = &exchange.epoch;
    view.timeout_claimed = &exchange.timeout_claimed;
    view.report = &exchange.report;
    view.device_error = &error;
    state.diagnostics = DeviceDiagnostics::none();
  }

  LaneState state{};
  DeviceError error{};
  LaneView view{};
};

// Runs `block`, and `other` before its access number `at`. False: the block makes fewer accesses.
bool interleave(int at, const std::function<void()>& block, const std::function<void()>& other) {
  int accesses = 0;
  bool ran = false;
  std::function<void()> count;
  count = [&] {
    if (++accesses != at) return;
    ran = true;
    other();
  };
  on_host::before_access = count;
  block();
  on_host::before_access = nullptr;
  return ran;
}

// --- records ---------------------------------------------------------------------------------------------

void abort_with(const DeviceLane& lane, std::uint64_t call, int number) {
  abort_call(lane.view, call, Operation::dispatch, DeviceError::Reason::option, number, number, number,
             number);
}

bool is_whole(const DeviceError& error) {
  return error.peer == error.index && error.peer == error.mine && error.peer == error.theirs;
}

TEST(DeviceCode, OneBlockOfACallWritesTheErrorRecord) {
  for (int at = 1;; ++at) {
    Exchange exchange;
    DeviceLane lane(exchange);
    int records = 0;
    const auto read = [&] {
      const std::optional<DeviceError> error = take_error(lane.error);
      EXPECT_TRUE(!error || is_whole(*error));
      records += error.has_value();
    };
    const bool ran = interleave(
        at, [&] { abort_with(lane, kCall, 1); },
        [&] {
          abort_with(lane, kCall, 2);
          read();
        });
    read();
    EXPECT_EQ(records, 1) << "the other block ran before access " << at;
    if (!ran) break;
  }
}

TEST(DeviceCode, ErrorRecordsAreReadWhole) {
  constexpr std::uint64_t kCalls = 300;
  Exchange exchange;
  DeviceLane lane(exchange);
  std::atomic<std::uint64_t> call = 0;
  std::atomic<int> ended = 0;
  std::vector<std::thread> blocks;
  for (int block = 0; block < 2; ++block) {
    blocks.emplace_back([&, block] {
      for (std::uint64_t number = 1; number <= kCalls; ++number) {
        while (call < number) std::this_thread::yield();
        abort_with(lane, number, 2 * static_cast<int>(number) + block);
        ++ended;
      }
    });
  }
  for (std::uint64_t number = 1; number <= kCalls; ++number) {
    call = number;
    const auto read = [&] {
      const std::optional<DeviceError> error = take_error(lane.error);
      if (!error) return 0;
      EXPECT_TRUE(is_whole(*error));
      EXPECT_EQ(error->call.value, number);
      EXPECT_EQ(static_cast<std::uint64_t>(error->peer) / 2, number);
      return 1;
    };
    int records = 0;
    while (ended < 2 * static_cast<int>(number)) records += read();
    records += read();
    EXPECT_EQ(records, 1);
  }
  for (std::thread& block : blocks) block.join();
}

TEST(DeviceCode, TheFirstErrorStandsUntilTheHostHasReadIt) {
  Exchange exchange;
  DeviceLane lane(exchange);
  abort_with(lane, kCall, 1);
  abort_with(lane, kCall + 1, 2);
  EXPECT_EQ(take_error(lane.error)->peer, 1);
  abort_with(lane, kCall + 2, 3);
  EXPECT_EQ(take_error(lane.error)->peer, 3);
}

TEST(DeviceCode, OneLaneWritesTheTimeoutRecord) {
  for (int at = 1;; ++at) {
    Exchange exchange;
    DeviceLane lanes[] = {DeviceLane(exchange), DeviceLane(exchange)};
    exchange.report.timeout.via = 0;  // as in zeroed memory
    std::optional<WaitRecord> first;
    const auto time_out = [&](int lane) {
      report_timeout(lanes[lane].view, {Operation::combine, kCall + static_cast<unsigned>(lane), lane}, 1);
    };
    const bool ran = interleave(
        at, [&] { time_out(0); },
        [&] {
          time_out(1);
          first = timeout_of(exchange.report, kFirstEpoch);
        });
    const WaitRecord last = timeout_of(exchange.report, kFirstEpoch).value();
    EXPECT_EQ(last.call, kCall + static_cast<unsigned>(last.peer)) << "mixed at access " << at;
    EXPECT_EQ(last.via, -1);
    EXPECT_EQ(last.peer, first.value_or(last).peer) << "overwritten at access " << at;
    for (const DeviceLane& lane : lanes) EXPECT_TRUE(!ran || is_aborted(lane.view, kExchangeFailed));
    if (!ran) break;
  }
}

// --- aborts ----------------------------------------------------------------------------------------------

void post_own_header(const DeviceLane& lane, const CallHeader& header) {
  for (int i = 0; i < kHeaderCounts; ++i) post_header_word(lane.view, kCall, i, header_word(header, i));
}

TEST(DeviceCode, AHeaderOfAnotherEpochAbortsTheCall) {
  Exchange exchange;
  DeviceLane lane(exchange);
  CallHeader mine, theirs;
  mine.terms = theirs.terms = AgreedOptions::of(Operation::combine);
  mine.facts = theirs.facts = make_header_facts(Operation::combine, 1);
  set_epoch(exchange.epoch, &mine);
  set_epoch({.number = kFirstEpoch + 1, .row_order_hash = 0, .placement_version = 0}, &theirs);
  post_own_header(lane, theirs);
  HeaderFacts facts;
  EXPECT_FALSE(await_all_headers(lane.view, kCall, mine, true, &facts));
  const std::optional<DeviceError> error = take_error(lane.error);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->reason, DeviceError::Reason::option);
  EXPECT_EQ(error->index, kEpochOption);
  EXPECT_EQ(error->mine, kFirstEpoch);
  EXPECT_EQ(error->theirs, kFirstEpoch + 1);
  EXPECT_FALSE(is_aborted(lane.view, kExchangeFailed));
}

TEST(DeviceCode, AFailureOfAnEarlierEpochIsOver) {
  Exchange exchange;
  DeviceLane lane(exchange);
  exchange.report.abort.value = exchange.report.timed_out.value = exchange.timeout_claimed = kFirstEpoch;
  EXPECT_TRUE(exchange_failed(lane.view));
  exchange.epoch.number = kFirstEpoch + 1;
  EXPECT_FALSE(exchange_failed(lane.view));
  EXPECT_FALSE(timeout_of(exchange.report, kFirstEpoch + 1));
  report_timeout(lane.view, {Operation::combine, kCall, 0}, 1);
  ASSERT_TRUE(timeout_of(exchange.report, kFirstEpoch + 1));
  EXPECT_EQ(exchange.report.timeout.call, kCall);
  EXPECT_EQ(exchange.timeout_claimed, kFirstEpoch + 1);
}

// Another block finds the exchange failed while the coordinator aborts the call because of a mismatch.
TEST(DeviceCode, AMismatchDoesNotHideThatTheExchangeHasFailed) {
  for (int at = 1;; ++at) {
    Exchange exchange;
    DeviceLane lane(exchange);
    CallHeader mine, theirs;
    mine.terms = theirs.terms = AgreedOptions::of(Operation::dispatch);
    mine.terms.add(1);
    theirs.terms.add(2);
    mine.facts = theirs.facts = make_header_facts(Operation::dispatch, 1);
    post_own_header(lane, theirs);
    const bool ran = interleave(
        at,
        [&] {
          HeaderFacts facts;
          EXPECT_FALSE(await_all_headers(lane.view, kCall, mine, true, &facts));
        },
        [&] { report_timeout(lane.view, {Operation::dispatch, kCall, 0}, 0); });
    EXPECT_TRUE(is_aborted(lane.view, kCall));
    EXPECT_EQ(is_aborted(lane.view, kExchangeFailed), ran) << "the other block ran before access " << at;
    if (!ran) break;
  }
}

// --- waits -----------------------------------------------------------------------------------------------

constexpr WaitTarget kOtherBlock{Operation::dispatch, kCall, 0};

TEST(DeviceCode, WaitForAnotherBlockEndsAtTheDeadline) {
  Exchange exchange;
  DeviceLane lane(exchange);
  lane.view.deadline = 20'000'000;
  const Flag flag{kCall - 1};
  EXPECT_FALSE(wait_local_flag(lane.view, &flag, kOtherBlock));
  const std::optional<WaitRecord> record = timeout_of(exchange.report, kFirstEpoch);
  ASSERT_TRUE(record);
  EXPECT_EQ(record->call, kCall);
  EXPECT_EQ(record->expected, kCall);
  EXPECT_EQ(record->observed, kCall - 1);
  EXPECT_TRUE(is_aborted(lane.view, kCall + 1));
}

TEST(DeviceCode, WaitForAnotherBlockEndsWhenTheGroupFails) {
  Exchange exchange;
  DeviceLane lane(exchange);
  const Flag flag{};
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    store_release(exchange.report.abort, 1);
  });
  EXPECT_FALSE(wait_local_flag(lane.view, &flag, kOtherBlock));
  EXPECT_TRUE(is_aborted(lane.view, kCall + 1));
  host.join();
}

TEST(DeviceCode, WaitForAnotherBlockReturnsWithWhatItHasWritten) {
  Exchange exchange;
  DeviceLane lane(exchange);
  Flag flag{};
  int counts = 0;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    counts = 3;
    store_release_gpu(&flag, kCall);
  });
  EXPECT_TRUE(wait_local_flag(lane.view, &flag, kOtherBlock));
  EXPECT_EQ(counts, 3);
  other.join();
}

// The coordinator has seen the flags of all blocks and then aborts the call.
TEST(DeviceCode, WaitForAnotherBlockSucceedsInACallThatIsAbortedLater) {
  for (int at = 1;; ++at) {
    Exchange exchange;
    DeviceLane lane(exchange);
    Flag flag{};
    bool counted = false;
    const bool ran = interleave(
        at, [&] { counted = wait_local_flag(lane.view, &flag, kOtherBlock); },
        [&] {
          store_release_gpu(&flag, kCall);
          set_aborted(lane.view, kCall);
        });
    ASSERT_TRUE(ran);
    EXPECT_TRUE(counted) << "at access " << at;
    if (at == 100) break;
  }
}

// --- flags -----------------------------------------------------------------------------------------------

// Whether the functions for flags take the address of any other word.
template <class Word>
constexpr bool kTakesWord =
    requires(Word* word) { load_relaxed_sys(word); } || requires(Word* word) { load_acquire_sys(word); } ||
    requires(Word* word) { store_relaxed_sys(word, 1); } ||
    requires(Word* word) { store_release_sys(word, 1); };
static_assert(kTakesWord<Flag> && !kTakesWord<std::uint64_t> && !kTakesWord<std::uint32_t> &&
              !kTakesWord<LLPacket>);

TEST(DeviceCode, FlagsAndPacketsAreAccessedWithOneWidthEach) {
  on_host::access_widths.reset();
  Exchange exchange;
  DeviceLane lane(exchange);
  lane.view.deadline = 5'000'000;
  for (const int count : {1, 2, 4}) {
    Flag* flags = memory::combine_flags(lane.view, 0, 1, count);
    publish_now(flags, count, kCall);
    for (int i = 0; i < count; ++i)
      EXPECT_EQ(wait_flag(lane.view, flags + i, nullptr, {Operation::combine, kCall, 0}), WaitResult::ready);
  }
  CallHeader header;
  header.terms = AgreedOptions::of(Operation::combine);
  header.facts = make_header_facts(Operation::combine, 5);
  post_own_header(lane, header);
  std::uint64_t word = 0;
  EXPECT_TRUE(await_header_word(lane.view, kCall, Operation::combine, 0, kHeaderFacts, &word));
  EXPECT_EQ(HeaderFacts::of(word).count, 5);
  // The next call's header does not come: the long wait.
  EXPECT_FALSE(await_header_word(lane.view, kCall + 2, Operation::combine, 0, kHeaderFacts, &word));
  EXPECT_FALSE(on_host::access_widths.mixed());
}

// --- diagnostics -----------------------------------------------------------------------------------------

// Findings of kernels, and check() with kernels running between its accesses to the device. Findings of each
// kind come in twos, at positions from 10 on.
struct Findings {
  static constexpr int kKinds = 3;

  Exchange exchange;
  DeviceLane lane{exchange};
  DiagnosticsReader reader{0, 1};
  std::int64_t recorded = 0, next_position = 10;
  // Findings reported so far, by kind. Overflows have no count.
  std::array<std::int64_t, kKinds> reported{};
  std::array<std::vector<std::int64_t>, kKinds> positions;

  void find() {
    DeviceDiagnostics& found = lane.state.diagnostics;
    record_findings(&found.bad_ids, 2, [&] { found.first_bad_id_route = next_position; });
    record_bad_source(lane.view, next_position + 1);
    record_bad_source(lane.view, next_position);
    record_findings(&found.overflows, 1, [&] { found.overflow = {.rank = 0, .dropped = next_position}; });
    ++next_position;
    recorded += 2;
  }

  // `step` runs before and after each access of the reader.
  void take(const std::function<void()>& step) {
    const CallDiagnostics taken = reader.take(
        [&] {
          step();
          const DeviceDiagnostics copy = lane.state.diagnostics;
          step();
          return copy;
        },
        [&](std::int64_t offset, std::uint64_t number) {
          step();
          std::memcpy(reinterpret_cast<std::byte*>(&lane.state.diagnostics) + offset, &number, sizeof number);
          step();
        });
    add(0, taken.bad_id.count, taken.bad_id.token);
    add(1, taken.bad_source.count, taken.bad_source.index);
    add(2, taken.overflow.dropped, taken.overflow.dropped);
  }

 private:
  void add(std::size_t kind, std::int64_t count, std::int64_t position) {
    reported[kind] += count;
    if (count > 0) positions[kind].push_back(position);
  }
};

TEST(DeviceCode, DiagnosticsThatAreFoundDuringACheckAreNotLost) {
  int steps = 0;
  for (int at = 0; at <= steps; ++at) {
    SCOPED_TRACE(at);
    Findings findings;
    findings.find();
    steps = 0;
    findings.take([&] {
      if (++steps == at) findings.find();
    });
    findings.find();
    findings.take([] {});
    findings.take([] {});
    EXPECT_EQ(findings.reported[0], findings.recorded);
    EXPECT_EQ(findings.reported[1], findings.recorded);
    for (const std::vector<std::int64_t>& positions : findings.positions) {
      ASSERT_EQ(positions.size(), 2u);
      EXPECT_EQ(positions[0], 10);
      EXPECT_TRUE(positions[1] == 11 || positions[1] == 12) << positions[1];
    }
  }
  EXPECT_GT(steps, 10);
}

TEST(DeviceCode, DiagnosticsOfACheckedCallAreReportedOnce) {
  Findings findings;
  findings.take([] {});
  for (int round = 0; round < 3; ++round) {
    findings.find();
    findings.find();
    findings.take([] {});
    findings.take([] {});
  }
  for (const std::vector<std::int64_t>& positions : findings.positions)
    EXPECT_EQ(positions, (std::vector<std::int64_t>{10, 12, 14}));
  EXPECT_EQ(findings.reported[0], findings.recorded);
  EXPECT_EQ(findings.reported[1], findings.recorded);
}

}  // namespace
}  // namespace ferry::cuda
