// Ranks as processes that last as long as a test.
//
// A test forks its ranks once, in the middle of its body, and each process goes through the rest of it: what
// is played by a group of its size it plays as its rank, all else it skips. Where a process has to start a
// driver, which takes longer than most of what is played, that is once a test instead of once a case.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ferry/group.hpp"

namespace ferry::contract {

class LastingRanks {
 public:
  // Plays `body` as a rank of a group of `ranks`, if this process is one. In the process of the test nothing
  // is played: its first call for so many ranks forks them, once those of other groups have ended. Throws
  // what `body` throws.
  void run(int ranks, const std::function<void(Rank)>& body);

  // In a rank's process: ends it; one that has failed is lost to the others. In that of the test: nothing.
  void leave(bool failed);

  // In the process of the test: waits for all ranks. Those that have failed so far, in words. A while after
  // one has failed, others are killed.
  std::string wait();

 private:
  struct Process {
    int rank, ranks;
    pid_t id;
  };

  void fork_ranks(int ranks);
  [[noreturn]] static void end(int status);

  std::optional<Rank> me_;  // in a rank's process
  std::set<int> forked_;    // sizes of groups
  std::vector<Process> running_;
  std::string failed_;
};

}  // namespace ferry::contract
