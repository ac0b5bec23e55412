// PersistentRanks without devices. A call of finish_test() stands for the end of a test: the processes of the
// ranks reach it too, and wait there for the next run().
#include "harness/persistent_ranks.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <stdexcept>
#include <string>
#include <vector>

namespace ferry::contract {
namespace {

constexpr int kMaxRanks = 4;

// Ranks record here, in shared memory, what they ran.
class PersistentRanksTest : public testing::Test {
 protected:
  struct Record {
    pid_t processes[kMaxRanks];
    int bodies[kMaxRanks];
  };

  PersistentRanksTest()
      : record_(static_cast<Record*>(
            mmap(nullptr, sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~PersistentRanksTest() override { munmap(record_, sizeof(Record)); }

  // Runs a collective body in a group of `size` ranks.
  void run_group(int size) {
    ranks_.run(size, [&](Rank rank) {
      std::vector<pid_t> all(size);
      const pid_t mine = getpid();
      rank.all_gather(&mine, all.data(), sizeof mine);
      if (rank.size() != size || all[rank.index()] != mine)
        throw std::runtime_error("wrong rank or group size");
      record_->processes[rank.index()] = mine;
      ++record_->bodies[rank.index()];
    });
  }

  // Runs a body that fails on rank 1 while the others wait for it.
  template <class Fail>
  void run_failing_group(Fail fail) {
    try {
      ranks_.run(3, [&](Rank rank) {
        if (rank.index() == 1) fail();
        rank.barrier();
      });
    } catch (const std::exception&) {
      ranks_.finish_test(true);
    }
  }

  std::vector<pid_t> processes() const { return {record_->processes, record_->processes + kMaxRanks}; }
  std::vector<int> bodies() const { return {record_->bodies, record_->bodies + kMaxRanks}; }

  // Kills a process and waits until it exited. Its parent can still wait for it.
  static void kill_process(pid_t process) {
    siginfo_t info;
    kill(process, SIGKILL);
    waitid(P_PID, static_cast<id_t>(process), &info, WEXITED | WNOWAIT);
  }

  static void expect_gone(const std::vector<pid_t>& processes) {
    for (const pid_t process : processes) {
      EXPECT_EQ(kill(process, 0), -1) << process;
      EXPECT_EQ(errno, ESRCH) << process;
    }
  }

  PersistentRanks ranks_{kMaxRanks};
  Record* record_;
};

TEST_F(PersistentRanksTest, RanksRunOnlyInTheirGroups) {
  for (const int size : {2, 3, 2, 1, 4}) run_group(size);
  EXPECT_EQ(ranks_.finish_test(HasFailure()), "");
  EXPECT_EQ(bodies(), (std::vector{5, 4, 2, 1}));
  EXPECT_EQ(ranks_.shut_down(), "");
}

TEST_F(PersistentRanksTest, ProcessesPersistAcrossTests) {
  run_group(4);
  EXPECT_EQ(ranks_.finish_test(HasFailure()), "");
  const std::vector<pid_t> first = processes();
  for (const int size : {2, 4, 3, 4}) {
    run_group(size);
    EXPECT_EQ(ranks_.finish_test(HasFailure()), "");
    EXPECT_EQ(processes(), first);
  }
  EXPECT_EQ(ranks_.finish_test(HasFailure()), "");  // of a test without ranks
  EXPECT_EQ(ranks_.shut_down(), "");
  EXPECT_EQ(bodies(), (std::vector{5, 5, 4, 3}));
  expect_gone(first);
}

// Ranks that wait for the failed one fail too. Rank 3 does not, but is replaced with the others.
TEST_F(PersistentRanksTest, FailedRanksAreReplaced) {
  run_group(4);
  EXPECT_EQ(ranks_.finish_test(HasFailure()), "");
  const std::vector<pid_t> first = processes();
  run_failing_group([] { throw std::runtime_error("on purpose"); });
  const std::string failed = ranks_.finish_test(HasFailure());
  EXPECT_EQ(std::count(failed.begin(), failed.end(), ';'), 3) << failed;
  for (const char* rank :
       {"rank 0 with exit code 1;", "rank 1 with exit code 1;", "rank 2 with exit code 1;"})
    EXPECT_NE(failed.find(rank), std::string::npos) << failed;
  expect_gone(first);
  run_group(4);
  EXPECT_EQ(ranks_.finish_test(HasFailure()), "");
  for (int rank = 0; rank < kMaxRanks; ++rank) EXPECT_NE(processes()[rank], first[rank]);
  EXPECT_EQ(ranks_.shut_down(), "");
  expect_gone(processes());
}

TEST_F(PersistentRanksTest, KilledRanksAreNamed) {
  run_failing_group([] { kill(getpid(), SIGKILL); });
  const std::string failed = ranks_.finish_test(HasFailure());
  EXPECT_NE(failed.find("rank 1 by signal 9;"), std::string::npos) << failed;
  EXPECT_EQ(failed.find("rank 3"), std::string::npos) << failed;
}

TEST_F(PersistentRanksTest, RanksKilledBetweenTestsAreReported) {
  run_group(4);
  EXPECT_EQ(ranks_.finish_test(HasFailure()), "");
  const std::vector<pid_t> first = processes();
  kill_process(first[3]);
  run_group(1);
  EXPECT_NE(ranks_.finish_test(HasFailure()).find("rank 3 by signal 9;"), std::string::npos);
  expect_gone(first);
  run_group(4);
  EXPECT_EQ(ranks_.finish_test(HasFailure()), "");
  kill_process(processes()[2]);
  EXPECT_EQ(ranks_.shut_down(), " rank 2 by signal 9;");
}

TEST_F(PersistentRanksTest, LargerGroupsAreRefused) {
  EXPECT_THROW(run_group(kMaxRanks + 1), std::invalid_argument);
  run_group(kMaxRanks);
  EXPECT_EQ(ranks_.finish_test(HasFailure()), "");
}

}  // namespace
}  // namespace ferry::contract
