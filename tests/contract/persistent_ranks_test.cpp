// The processes that the contract's tests on devices run in, without devices. Where end_test() stands a test
// ends and another begins: ranks come there too, and go on when they are let.
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

constexpr int kMost = 4;

// What ranks write here the process of the tests reads.
class PersistentRanksTest : public testing::Test {
 protected:
  struct Seen {
    pid_t processes[kMost];
    int bodies[kMost];
  };

  PersistentRanksTest()
      : seen_(static_cast<Seen*>(
            mmap(nullptr, sizeof(Seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~PersistentRanksTest() override { munmap(seen_, sizeof(Seen)); }

  // One body, collective.
  void play(int size) {
    ranks_.run(size, [&](Rank rank) {
      std::vector<pid_t> all(size);
      const pid_t mine = getpid();
      rank.all_gather(&mine, all.data(), sizeof mine);
      if (rank.size() != size || all[rank.index()] != mine) throw std::runtime_error("another's place");
      seen_->processes[rank.index()] = mine;
      ++seen_->bodies[rank.index()];
    });
  }

  // A body that ends badly on rank 1, for which the others wait.
  template <class Fail>
  void play_failing(Fail fail) {
    try {
      ranks_.run(3, [&](Rank rank) {
        if (rank.index() == 1) fail();
        rank.barrier();
      });
    } catch (const std::exception&) {
      ranks_.end_test(true);
    }
  }

  std::vector<pid_t> processes() const { return {seen_->processes, seen_->processes + kMost}; }
  std::vector<int> bodies() const { return {seen_->bodies, seen_->bodies + kMost}; }

  // Until it is gone for everyone but its parent.
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

  PersistentRanks ranks_{kMost};
  Seen* seen_;
};

TEST_F(PersistentRanksTest, PlayWhatIsTheirs) {
  for (const int size : {2, 3, 2, 1, 4}) play(size);
  EXPECT_EQ(ranks_.end_test(HasFailure()), "");
  EXPECT_EQ(bodies(), (std::vector{5, 4, 2, 1}));
  EXPECT_EQ(ranks_.close(), "");
}

TEST_F(PersistentRanksTest, GoFromTestToTest) {
  play(4);
  EXPECT_EQ(ranks_.end_test(HasFailure()), "");
  const std::vector<pid_t> first = processes();
  for (const int size : {2, 4, 3, 4}) {
    play(size);
    EXPECT_EQ(ranks_.end_test(HasFailure()), "");
    EXPECT_EQ(processes(), first);
  }
  EXPECT_EQ(ranks_.end_test(HasFailure()), "");  // of a test that played nothing
  EXPECT_EQ(ranks_.close(), "");
  EXPECT_EQ(bodies(), (std::vector{5, 5, 4, 3}));
  expect_gone(first);
}

// Whoever waits for it learns that it is lost; who does not is well.
TEST_F(PersistentRanksTest, FailAndAreReplaced) {
  play(4);
  EXPECT_EQ(ranks_.end_test(HasFailure()), "");
  const std::vector<pid_t> first = processes();
  play_failing([] { throw std::runtime_error("on purpose"); });
  const std::string failed = ranks_.end_test(HasFailure());
  EXPECT_EQ(std::count(failed.begin(), failed.end(), ';'), 3) << failed;
  for (const char* rank :
       {"rank 0 with exit code 1;", "rank 1 with exit code 1;", "rank 2 with exit code 1;"})
    EXPECT_NE(failed.find(rank), std::string::npos) << failed;
  expect_gone(first);
  play(4);
  EXPECT_EQ(ranks_.end_test(HasFailure()), "");
  for (int rank = 0; rank < kMost; ++rank) EXPECT_NE(processes()[rank], first[rank]);
  EXPECT_EQ(ranks_.close(), "");
  expect_gone(processes());
}

TEST_F(PersistentRanksTest, AreNamedWhenTheyAreKilled) {
  play_failing([] { kill(getpid(), SIGKILL); });
  const std::string failed = ranks_.end_test(HasFailure());
  EXPECT_NE(failed.find("rank 1 by signal 9;"), std::string::npos) << failed;
  EXPECT_EQ(failed.find("rank 3"), std::string::npos) << failed;
}

TEST_F(PersistentRanksTest, AreMissedWhenTheyEndBetweenTests) {
  play(4);
  EXPECT_EQ(ranks_.end_test(HasFailure()), "");
  const std::vector<pid_t> first = processes();
  kill_process(first[3]);
  play(1);
  EXPECT_NE(ranks_.end_test(HasFailure()).find("rank 3 by signal 9;"), std::string::npos);
  expect_gone(first);
  play(4);
  EXPECT_EQ(ranks_.end_test(HasFailure()), "");
  kill_process(processes()[2]);
  EXPECT_EQ(ranks_.close(), " rank 2 by signal 9;");
}

TEST_F(PersistentRanksTest, AreNeverMoreThanTheirMost) {
  EXPECT_THROW(play(kMost + 1), std::invalid_argument);
  play(kMost);
  EXPECT_EQ(ranks_.end_test(HasFailure()), "");
}

}  // namespace
}  // namespace ferry::contract
