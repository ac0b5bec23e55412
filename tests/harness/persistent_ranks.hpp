// Ranks as processes that persist from test to test, for backends whose driver takes longer to start than
// most tests run.
//
// The test process forks them once, inside the body of the first test that needs them. From there on every
// process runs the same program: the rest of that test and all tests after it. run() executes its body in the
// processes that are ranks of the group it names, and returns at once in all others. finish_test() is where
// processes wait for each other.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ferry/group.hpp"
#include "runtime/support.hpp"

namespace ferry::contract {

class PersistentRanks {
 public:
  // The first run() forks `max_ranks` processes; each calls on_fork(rank).
  explicit PersistentRanks(int max_ranks, std::function<void(int)> on_fork = {});
  ~PersistentRanks();  // in the test process: kills the ranks that are left
  PersistentRanks(const PersistentRanks&) = delete;
  PersistentRanks& operator=(const PersistentRanks&) = delete;

  // In a rank's process: runs `body` if this process is one of the first `ranks` ranks, and throws what it
  // throws. In the test process: the first call in a test forks the ranks or lets them proceed to that test.
  void run(int ranks, const std::function<void(Rank)>& body);

  // Ends a test. In a rank's process: returns when the next test that needs ranks starts; if `failed`, exits
  // instead, and the other ranks lose this one. In the test process: waits until every rank finished the
  // test, and returns a text that names the ranks that failed. When one failed, all are replaced: ranks that
  // do not finish within a minute of the failure are killed.
  std::string finish_test(bool failed);

  // In the test process, between tests: lets the ranks exit. Returns a text that names those that did not
  // exit cleanly.
  std::string shut_down();

  // Whether this process is a rank's.
  bool is_rank() const { return rank_ >= 0; }

  // In a rank's process: the test to run.
  const testing::TestInfo* current_test() const;

 private:
  struct Progress;
  struct Process {
    int rank;
    pid_t id;
  };

  void fork_ranks();
  void start_test();
  Rank& join(int ranks);
  void wait_for_next_test();
  std::string wait_for(const std::function<bool(int rank)>& finished,
                       std::optional<test::Stopwatch> since = {});
  std::string reap();
  void kill_all();
  [[noreturn]] static void exit_process(int status);

  int max_ranks_;
  std::function<void(int)> on_fork_;
  std::shared_ptr<Progress> progress_;  // in memory shared by all processes

  // In the test process.
  std::vector<Process> processes_;
  bool test_is_running_ = false;  // the ranks were let into the current test

  // In a rank's process.
  int rank_ = -1;
  int test_number_ = 0;
  std::vector<test::TestBootstrap> meetings_;  // by group size, from 1
  std::map<int, Rank> groups_;                 // by size: the groups that this rank has joined
};

// The program's persistent ranks, shared by all its tests; they exit after the last test. In a rank's
// process, tests that do not run on its rank are skipped, and only failures are printed.
PersistentRanks& program_ranks();

}  // namespace ferry::contract
