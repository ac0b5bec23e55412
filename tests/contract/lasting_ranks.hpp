// Ranks as processes that last as long as a test.
//
// A test forks its ranks once, in the middle of its body, and each process goes through the rest of it: what
// is played by a group of its size it plays as its rank, all else it skips. Where a process has to start a
// driver, which takes longer than most of what is played, that is once a test instead of once a case.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "ferry/group.hpp"

namespace ferry::contract {

class LastingRanks {
 public:
  // Plays `body` as a rank of a group of `ranks`, if this process is one. In the process of the test nothing
  // is played: its first call for so many ranks forks them. Throws what `body` throws.
  void run(int ranks, const std::function<void(Rank)>& body);

  // In a rank's process: ends it, with status 1 if it has failed. In that of the test: nothing.
  void leave(bool failed);

  // In the process of the test: waits for all ranks. Those that have failed, in words.
  std::string wait();

 private:
  void fork_ranks(int ranks);

  std::optional<Rank> me_;  // in a rank's process
  std::map<int, std::vector<pid_t>> groups_;
};

}  // namespace ferry::contract
