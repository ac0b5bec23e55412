// Kernels that wait on a GPU, and the failure monitor that makes them return when the group fails.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>

#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/protocol/failure_monitor.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "cuda/memory/devices.hpp"
#include "cuda/memory/kernels.hpp"
#include "group/rank_state.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

using cuda::FailureMonitor;
using cuda::HostSignals;
using cuda::PinnedMemory;

class KernelAborts : public testing::TestWithParam<GroupKind> {
 protected:
  void SetUp() override { FERRY_SKIP_WITHOUT_DEVICES(1); }
};
INSTANTIATE_TEST_SUITE_P(Kinds, KernelAborts, testing::ValuesIn(kGroupKinds),
                         [](const auto& kind) { return name(kind.param); });

// A rank whose kernel waits for an abort.
struct WaitingRank {
  explicit WaitingRank(const Rank& rank)
      : memory(sizeof(HostSignals)),
        report(reinterpret_cast<HostSignals*>(memory.data())),
        monitor(rank, report, kNoFaultDeadline) {
    rank.barrier();  // allocating pinned memory may wait for running kernels
    start_wait(stream.get(), report);
  }

  void check_ends_within(double seconds) const {
    const Stopwatch stopwatch;
    stream.synchronize();
    FERRY_CHECK(stopwatch.seconds() < seconds, str(stopwatch.seconds()));
  }

  PinnedMemory memory;
  HostSignals* report;
  TestStream stream;
  FailureMonitor monitor;
};

TEST_P(KernelAborts, TimeoutEndsEveryKernel) {
  run_ranks(GetParam(), 4, kNoFaultDeadline, [](const Rank& rank) {
    const WaitingRank waiting(rank);
    rank.barrier();
    const TestStream another;
    if (rank.index() == 2) start_timeout(another.get(), waiting.report, {Operation::combine, 9, 2, 0, 9, 8});
    waiting.check_ends_within(1.0);
    another.synchronize();
    require_text(expect_thrown<TimeoutError>([&] { rank.barrier(); }),
                 str("no sign of rank 0 for ", kNoFaultDeadline,
                     " s: rank 2 waited for rank 0 in combine 9 (expected 9, observed 8)"));
  });
}

#ifdef FERRY_TEST_PROCESSES

TEST_P(KernelAborts, KilledRankEndsEveryKernel) {
  SharedValue<std::atomic<int>> done;
  EXPECT_ANY_THROW(run_ranks(GetParam(), 4, kNoFaultDeadline, [&](const Rank& rank) {
    const WaitingRank waiting(rank);
    rank.barrier();
    if (rank.index() == 1) raise(SIGKILL);
    waiting.check_ends_within(1.0);
    FERRY_CHECK(expect_thrown<PeerLostError>([&] { rank.barrier(); }).record.peer == 1, "");
    ++*done;
  }));
  EXPECT_EQ(*done, 3);
}

#endif

}  // namespace
}  // namespace ferry::test
