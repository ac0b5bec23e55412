#include "contract/lasting_ranks.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <stdexcept>

#include "core/text.hpp"
#include "runtime/support.hpp"

namespace ferry::contract {

void LastingRanks::run(int ranks, const std::function<void(Rank)>& body) {
  if (!me_ && forked_.insert(ranks).second) fork_ranks(ranks);
  if (me_ && me_->size() == ranks) body(*me_);
}

void LastingRanks::fork_ranks(int ranks) {
  wait();
  test::seed();  // drawn here, so that all have the same
  const test::Meeting meeting(ranks);
  const pid_t parent = getpid();
  for (int rank = 0; rank < ranks; ++rank) {
    std::cout.flush();
    std::fflush(stdout);
    const pid_t process = fork();
    if (process < 0) {
      for (const Process& begun : running_) kill(begun.id, SIGKILL);
      throw std::runtime_error(str("cannot fork rank ", rank, " of ", ranks));
    }
    if (process > 0) {
      running_.push_back({rank, ranks, process});
      continue;
    }
    // A test that is killed leaves no ranks behind.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) end(1);
    running_.clear();
    try {
      Group mine = Group::custom(meeting.bootstrap(rank));
      mine.set_deadline(test::kPatience);
      me_ = mine.join();
    } catch (const std::exception& error) {
      std::cerr << "rank " << rank << " of " << ranks << ": " << error.what() << std::endl;
      end(1);
    }
    return;
  }
}

void LastingRanks::leave(bool failed) {
  if (!me_) return;
  // Not in good order, if it has failed.
  if (!failed) me_.reset();
  end(failed ? 1 : 0);
}

void LastingRanks::end(int status) {
  std::cout.flush();
  std::fflush(stdout);
  _exit(status);
}

std::string LastingRanks::wait() {
  std::optional<test::Stopwatch> since_failure;
  while (!running_.empty()) {
    for (std::size_t i = 0; i < running_.size();) {
      const auto [rank, ranks, id] = running_[i];
      int status = 0;
      const pid_t ended = waitpid(id, &status, WNOHANG);
      if (ended == 0) {
        ++i;
        continue;
      }
      if (ended != id || status != 0) {
        failed_ += str(" rank ", rank, " of ", ranks, " with status ", status, ";");
        if (!since_failure) since_failure.emplace();
      }
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (since_failure && since_failure->seconds() > test::kPatience)
      for (const Process& process : running_) kill(process.id, SIGKILL);
    if (!running_.empty()) test::sleep_seconds(0.002);
  }
  return failed_;
}

}  // namespace ferry::contract
