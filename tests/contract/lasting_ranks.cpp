#include "contract/lasting_ranks.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "core/text.hpp"
#include "runtime/support.hpp"

namespace ferry::contract {

void LastingRanks::run(int ranks, const std::function<void(Rank)>& body) {
  if (!me_ && groups_.find(ranks) == groups_.end()) fork_ranks(ranks);
  if (me_ && me_->size() == ranks) body(*me_);
}

void LastingRanks::fork_ranks(int ranks) {
  test::seed();  // drawn here, so that all have the same
  const test::Meeting meeting(ranks);
  std::vector<pid_t>& group = groups_[ranks];
  for (int rank = 0; rank < ranks; ++rank) {
    std::cout.flush();
    std::fflush(stdout);
    const pid_t process = fork();
    if (process < 0) throw std::runtime_error(str("cannot fork rank ", rank, " of ", ranks));
    if (process == 0) {
      groups_.clear();
      Group mine = Group::custom(meeting.bootstrap(rank));
      mine.set_deadline(test::kPatience);
      me_ = mine.join();
      return;
    }
    group.push_back(process);
  }
}

void LastingRanks::leave(bool failed) {
  if (!me_) return;
  me_.reset();
  std::cout.flush();
  std::fflush(stdout);
  _exit(failed ? 1 : 0);
}

std::string LastingRanks::wait() {
  std::string failed;
  for (const auto& [ranks, group] : groups_) {
    for (std::size_t rank = 0; rank < group.size(); ++rank) {
      int status = 0;
      waitpid(group[rank], &status, 0);
      if (status != 0) failed += str(" rank ", rank, " of ", ranks, " with status ", status);
    }
  }
  groups_.clear();
  return failed;
}

}  // namespace ferry::contract
