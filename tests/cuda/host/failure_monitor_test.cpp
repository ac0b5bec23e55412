// The failure monitor: the host thread that aborts waiting kernels when the group fails, and reports their
// timeouts to the group. Here the signals lie in ordinary memory, and the test acts as the kernel.
#include "backends/cuda/protocol/failure_monitor.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <memory>

#include "group/rank_state.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

using cuda::FailureMonitor;
using cuda::HostSignals;
using cuda::load_acquire;
using cuda::store_release;

class FailureMonitors : public testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, FailureMonitors, testing::ValuesIn(kGroupKinds),
                         [](const auto& kind) { return name(kind.param); });

// Waits as a kernel does. Returns the seconds until the abort word was set.
double seconds_until_abort(HostSignals& signals) {
  const Stopwatch watch;
  while (load_acquire(signals.abort) == 0) {
    FERRY_CHECK(watch.seconds() < 5, "the kernel was not aborted");
    sleep_seconds(0.001);
  }
  return watch.seconds();
}

void time_out(HostSignals& signals, const WaitRecord& record) {
  signals.timeout = record;
  store_release(signals.timed_out, 1);
}

long threads() {
  namespace fs = std::filesystem;
  return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
}

TEST_P(FailureMonitors, GroupFailureAbortsKernels) {
  run_ranks(GetParam(), 4, kNoFaultDeadline, [](const Rank& rank) {
    HostSignals signals{};
    const FailureMonitor monitor(rank, &signals, kNoFaultDeadline);
    rank.barrier();
    sleep_seconds(0.3);
    FERRY_CHECK(load_acquire(signals.abort) == 0, "aborted before any failure");
    rank.barrier();
    if (rank.index() == 1) rank.state().time_out({Operation::combine, 5, 1, 2, 5, 4}, 3);
    FERRY_CHECK(seconds_until_abort(signals) < 0.5, "");
    require_text(expect_thrown<TimeoutError>([&] { rank.barrier(); }), "no sign of rank 2 for 3 s");
  });
}

TEST_P(FailureMonitors, KernelTimeoutReachesAllRanks) {
  run_ranks(GetParam(), 4, kNoFaultDeadline, [](const Rank& rank) {
    HostSignals signals{};
    const FailureMonitor monitor(rank, &signals, 12.5);
    rank.barrier();
    if (rank.index() == 1) time_out(signals, {Operation::dispatch, 7, 1, 3, 7, 6});
    FERRY_CHECK(seconds_until_abort(signals) < 0.5, "");
    const auto error = expect_thrown<TimeoutError>([&] { rank.barrier(); });
    require_text(
        error,
        "no sign of rank 3 for 12.5 s: rank 1 waited for rank 3 in dispatch 7 (expected 7, observed 6)");
    FERRY_CHECK(error.record.peer == 3 && error.record.rank == rank.index(), describe(error.record));
  });
}

TEST_P(FailureMonitors, TimeoutJustBeforeDestructionIsReported) {
  run_ranks(GetParam(), 3, kNoFaultDeadline, [](const Rank& rank) {
    HostSignals signals{};
    {
      const FailureMonitor monitor(rank, &signals, kNoFaultDeadline);
      rank.barrier();
      sleep_seconds(0.005);
      if (rank.index() == 1) time_out(signals, {Operation::dispatch, 7, 1, 0, 7, 6});
    }
    if (rank.index() == 1) FERRY_CHECK(load_acquire(signals.abort) == 1, "");
    require_text(expect_thrown<TimeoutError>([&] {
                   while (true) rank.barrier();
                 }),
                 "no sign of rank 0");
  });
}

TEST_P(FailureMonitors, DepartureIsNotAFailure) {
  run_ranks(GetParam(), 4, kNoFaultDeadline, [](const Rank& rank) {
    HostSignals signals{};
    const FailureMonitor monitor(rank, &signals, kNoFaultDeadline);
    rank.barrier();
    if (rank.index() == 2) return;
    sleep_seconds(0.6);
    FERRY_CHECK(load_acquire(signals.abort) == 0 && !rank.state().control().failed(), "");
  });
}

TEST_P(FailureMonitors, DestructionIsImmediateAndLeavesNoThread) {
  run_ranks(GetParam(), 2, kNoFaultDeadline, [](const Rank& rank) {
    const Stopwatch stopwatch;
    for (int i = 0; i < 100; ++i) {
      HostSignals signals{};
      const FailureMonitor monitor(rank, &signals, kNoFaultDeadline);
    }
    FERRY_CHECK(stopwatch.seconds() < 1.0, str(stopwatch.seconds()));
    rank.barrier();
    // At most four: the ranks' threads, the thread that holds a process's lock, and the sanitizer's. /proc
    // lists a thread for a moment after it was joined.
    const Stopwatch listed;
    while (threads() > 1 + 3) FERRY_CHECK(listed.seconds() < 5, str(threads(), " threads"));
    rank.barrier();
  });
}

#ifdef FERRY_TEST_PROCESSES

TEST(FailureMonitorOfProcesses, KillIsNoticedWithinASecond) {
  SharedValue<std::atomic<int>> noticed;
  EXPECT_THROW(Group::processes(4).run([&](const Rank& rank) {
    HostSignals signals{};
    const FailureMonitor monitor(rank, &signals, kNoFaultDeadline);
    rank.barrier();
    if (rank.index() == 1) raise(SIGKILL);
    FERRY_CHECK(seconds_until_abort(signals) < 1.0, "");
    const auto error = expect_thrown<PeerLostError>([&] { rank.barrier(); });
    FERRY_CHECK(error.record.peer == 1, describe(error.record));
    ++*noticed;
  }),
               PeerLostError);
  EXPECT_EQ(*noticed, 3);
}

// No launcher reaps these processes, so only the failure monitors can notice.
TEST(FailureMonitorOfProcesses, KillInACustomGroupIsNoticed) {
  SharedValue<std::atomic<int>> noticed;
  EXPECT_ANY_THROW(run_ranks(GroupKind::custom_processes, 4, kNoFaultDeadline, [&](const Rank& rank) {
    HostSignals signals{};
    const FailureMonitor monitor(rank, &signals, kNoFaultDeadline);
    rank.barrier();
    if (rank.index() == 1) raise(SIGKILL);
    FERRY_CHECK(seconds_until_abort(signals) < 1.0, "");
    const auto error = expect_thrown<PeerLostError>([&] { rank.barrier(); });
    require_text(error, str("rank 1 (process ", rank.state().control().process_of(1), ") has died"));
    ++*noticed;
  }));
  EXPECT_EQ(*noticed, 3);
}

TEST(FailureMonitorOfProcesses, DoesNotKeepTheProcessAlive) {
  const Stopwatch stopwatch;
  const int status = run_process([] {
    Group::threads(1).run([](const Rank& rank) {
      static HostSignals signals{};
      new FailureMonitor(rank, &signals, kNoFaultDeadline);  // never deleted
    });
    exit(0);
  });
  EXPECT_EQ(status, 0);
  EXPECT_LT(stopwatch.seconds(), 1.0);
}

#endif

}  // namespace
}  // namespace ferry::test
