// Ranks as processes that last from test to test.
//
// They are forked once, in the middle of a test's body, and each process goes through the rest of it and then
// through the tests that follow, as that of the tests does: what is played by a group that it belongs to it
// plays as its rank, all else it skips. Where a process has to start a driver, which takes longer than most
// of what is played, that is once a program instead of once a case.
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
  // Forks `most` ranks when the first body comes. Each calls begun(rank) in its process.
  explicit PersistentRanks(int most, std::function<void(int)> begun = {});
  ~PersistentRanks();  // in the process of the tests: kills those that are left
  PersistentRanks(const PersistentRanks&) = delete;
  PersistentRanks& operator=(const PersistentRanks&) = delete;

  // Plays `body` as a rank of a group of `ranks`, if this process is one of its first so many. In the process
  // of the tests nothing is played: its first call in a test lets the ranks go on to that test, or forks
  // them. Throws what `body` throws.
  void run(int ranks, const std::function<void(Rank)>& body);

  // Ends a test. In a rank's process: returns when the next test is to be played; one that has failed ends,
  // and is lost to the others. In that of the tests: waits until every rank has ended it, and returns those
  // that have failed, in words; there are new ranks after them. A while after one has failed, others are
  // killed.
  std::string end_test(bool failed);

  // In the process of the tests, between two tests: the ranks end in good order. Those that did not, in
  // words.
  std::string close();

  // Whether this process is a rank's.
  bool is_rank() const { return rank_ >= 0; }

  // In a rank's process: what is to be played.
  const testing::TestInfo* test() const;

 private:
  struct Board;
  struct Process {
    int rank;
    pid_t id;
  };

  void fork_ranks();
  void go_on();
  Rank& join(int ranks);
  void wait_for_turn();
  std::string wait_for(const std::function<bool(int rank)>& ended, std::optional<test::Stopwatch> since = {});
  std::string reap();
  void kill_all();
  [[noreturn]] static void end(int status);

  int most_;
  std::function<void(int)> begun_;
  std::shared_ptr<Board> board_;  // memory of all

  // In the process of the tests.
  std::vector<Process> processes_;
  bool playing_ = false;  // they are at the test that runs

  // In a rank's process.
  int rank_ = -1;
  int turn_ = 0;
  std::vector<test::Meeting> meetings_;  // by size, from 1
  std::map<int, Rank> groups_;           // by size, those it has played in
};

}  // namespace ferry::contract
