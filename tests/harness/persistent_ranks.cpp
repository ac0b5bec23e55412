#include "harness/persistent_ranks.hpp"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <new>
#include <optional>
#include <stdexcept>

#include "base/text.hpp"

namespace ferry::contract {
namespace {

constexpr double kPoll = 0.0005;  // seconds

}  // namespace

// Turns are tests that ranks play, counted from 1.
struct PersistentRanks::Board {
  static constexpr int kRanks = 16, kOver = -1;
  std::atomic<int> turn{1};
  std::atomic<const testing::TestInfo*> test{nullptr};  // forked processes have it at the same address
  std::atomic<int> ended[kRanks]{};                     // the last turn that a rank has ended
};

PersistentRanks::PersistentRanks(int most, std::function<void(int)> begun)
    : most_(most), begun_(std::move(begun)) {
  if (most > Board::kRanks) throw std::invalid_argument(str("no room for ", most, " ranks"));
}

PersistentRanks::~PersistentRanks() {
  kill_all();
}

void PersistentRanks::run(int ranks, const std::function<void(Rank)>& body) {
  if (ranks > most_) throw std::invalid_argument(str("a group of ", ranks, " where ", most_, " ranks last"));
  if (!is_rank() && !playing_) go_on();
  if (rank_ >= 0 && rank_ < ranks) body(join(ranks));
}

void PersistentRanks::go_on() {
  if (processes_.empty()) return fork_ranks();
  playing_ = true;
  board_->test = testing::UnitTest::GetInstance()->current_test_info();
  ++board_->turn;
}

void PersistentRanks::fork_ranks() {
  test::seed();  // drawn here, so that all have the same
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory for ranks that last");
  board_ = std::shared_ptr<Board>(new (memory) Board, [](Board* p) { munmap(p, sizeof(Board)); });
  board_->test = testing::UnitTest::GetInstance()->current_test_info();
  std::vector<test::Meeting> meetings;
  for (int ranks = 1; ranks <= most_; ++ranks) meetings.emplace_back(ranks);
  const pid_t parent = getpid();
  std::cout.flush();
  std::fflush(nullptr);
  for (int rank = 0; rank < most_; ++rank) {
    const pid_t process = fork();
    if (process < 0) {
      kill_all();
      throw std::runtime_error(str("cannot fork rank ", rank, " of ", most_));
    }
    if (process > 0) {
      processes_.push_back({rank, process});
      continue;
    }
    // Tests that are killed leave no ranks behind.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) end(1);
    processes_.clear();
    rank_ = rank;
    turn_ = 1;
    meetings_ = std::move(meetings);
    if (begun_) begun_(rank);
    return;
  }
  playing_ = true;
}

// Collective among the first so many ranks, which all come here before the first body of that size.
Rank& PersistentRanks::join(int ranks) {
  auto mine = groups_.find(ranks);
  if (mine == groups_.end()) {
    Group group = Group::custom(meetings_[ranks - 1].bootstrap(rank_));
    group.set_deadline(test::kPatience);
    mine = groups_.emplace(ranks, group.join()).first;
  }
  return mine->second;
}

const testing::TestInfo* PersistentRanks::test() const {
  return board_->test;
}

std::string PersistentRanks::end_test(bool failed) {
  if (is_rank()) {
    if (failed) end(1);
    wait_for_turn();
    return {};
  }
  if (!playing_) return {};
  playing_ = false;
  const std::string ends = wait_for([&](int rank) { return board_->ended[rank] == board_->turn; });
  // Where a rank is lost, its groups are.
  if (!ends.empty()) kill_all();
  return ends;
}

// Ranks that have ended a test wait until all have: what one still holds of it would show in the next.
void PersistentRanks::wait_for_turn() {
  board_->ended[rank_] = turn_;
  while (board_->turn == turn_) test::sleep_seconds(kPoll);
  turn_ = board_->turn;
  if (turn_ != Board::kOver) return;
  groups_.clear();
  end(0);
}

std::string PersistentRanks::close() {
  if (is_rank()) end(1);  // was to wait for its turn
  if (processes_.empty()) return {};
  board_->turn = Board::kOver;
  return wait_for([](int) { return false; }, test::Stopwatch());
}

// Until each rank has ended what is asked for, or its process has ended. Those that did badly, in words.
// Patience begins with a failure, if not before.
std::string PersistentRanks::wait_for(const std::function<bool(int rank)>& ended,
                                      std::optional<test::Stopwatch> since) {
  for (std::string ends;; test::sleep_seconds(kPoll)) {
    ends += reap();
    if (!ends.empty() && !since) since.emplace();
    const bool late = since && since->seconds() > test::kPatience;
    bool all = true;
    for (const Process& process : processes_) {
      if (ended(process.rank)) continue;
      all = false;
      if (late) kill(process.id, SIGKILL);
    }
    if (all) return ends;
  }
}

// Takes leave of processes that have ended.
std::string PersistentRanks::reap() {
  std::string ends;
  std::erase_if(processes_, [&](const Process& process) {
    int status = 0;
    const pid_t ended = waitpid(process.id, &status, WNOHANG);
    if (ended == 0) return false;
    const bool told = board_->turn == Board::kOver;
    if (ended != process.id) {
      ends += str(" rank ", process.rank, " is nowhere;");
    } else if (WIFSIGNALED(status)) {
      ends += str(" rank ", process.rank, " by signal ", WTERMSIG(status), ";");
    } else if (!told || status != 0) {
      ends += str(" rank ", process.rank, " with exit code ", WEXITSTATUS(status), ";");
    }
    return true;
  });
  return ends;
}

void PersistentRanks::kill_all() {
  for (const Process& process : processes_) kill(process.id, SIGKILL);
  for (const Process& process : processes_) waitpid(process.id, nullptr, 0);
  processes_.clear();
}

void PersistentRanks::end(int status) {
  std::cout.flush();
  std::fflush(nullptr);
  _exit(status);
}

}  // namespace ferry::contract
