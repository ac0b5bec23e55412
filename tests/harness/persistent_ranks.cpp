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

// Shared by the processes. Tests that need ranks are numbered from 1.
struct PersistentRanks::Progress {
  static constexpr int kMaxRanks = 16, kShutDown = -1;
  std::atomic<int> test_number{1};
  std::atomic<const testing::TestInfo*> test{nullptr};  // the same address in forked processes
  std::atomic<int> finished[kMaxRanks]{};               // the last test that each rank finished
};

PersistentRanks::PersistentRanks(int max_ranks, std::function<void(int)> on_fork)
    : max_ranks_(max_ranks), on_fork_(std::move(on_fork)) {
  if (max_ranks > Progress::kMaxRanks)
    throw std::invalid_argument(
        str(max_ranks, " persistent ranks; at most ", Progress::kMaxRanks, " are supported"));
}

PersistentRanks::~PersistentRanks() {
  kill_all();
}

void PersistentRanks::run(int ranks, const std::function<void(Rank)>& body) {
  if (ranks > max_ranks_)
    throw std::invalid_argument(
        str("a group of ", ranks, " ranks; there are ", max_ranks_, " persistent ranks"));
  if (!is_rank() && !test_is_running_) start_test();
  if (rank_ >= 0 && rank_ < ranks) body(join(ranks));
}

void PersistentRanks::start_test() {
  if (processes_.empty()) return fork_ranks();
  test_is_running_ = true;
  progress_->test = testing::UnitTest::GetInstance()->current_test_info();
  ++progress_->test_number;
}

void PersistentRanks::fork_ranks() {
  test::seed();  // drawn before the fork: all ranks use the same
  void* memory = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("cannot map memory for persistent ranks");
  progress_ =
      std::shared_ptr<Progress>(new (memory) Progress, [](Progress* p) { munmap(p, sizeof(Progress)); });
  progress_->test = testing::UnitTest::GetInstance()->current_test_info();
  std::vector<test::TestBootstrap> meetings;
  for (int ranks = 1; ranks <= max_ranks_; ++ranks) meetings.emplace_back(ranks);
  const pid_t parent = getpid();
  std::cout.flush();
  std::fflush(nullptr);
  for (int rank = 0; rank < max_ranks_; ++rank) {
    const pid_t process = fork();
    if (process < 0) {
      kill_all();
      throw std::runtime_error(str("cannot fork rank ", rank, " of ", max_ranks_));
    }
    if (process > 0) {
      processes_.push_back({rank, process});
      continue;
    }
    // If the test process is killed, so are the ranks.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) exit_process(1);
    processes_.clear();
    rank_ = rank;
    test_number_ = 1;
    meetings_ = std::move(meetings);
    if (on_fork_) on_fork_(rank);
    return;
  }
  test_is_running_ = true;
}

// Collective among the first `ranks` ranks: all of them call it before their first body in a group of that
// size.
Rank& PersistentRanks::join(int ranks) {
  auto mine = groups_.find(ranks);
  if (mine == groups_.end()) {
    Group group = Group::custom(meetings_[ranks - 1].bootstrap(rank_));
    group.set_deadline(test::kNoFaultDeadline);
    mine = groups_.emplace(ranks, group.join()).first;
  }
  return mine->second;
}

const testing::TestInfo* PersistentRanks::current_test() const {
  return progress_->test;
}

std::string PersistentRanks::finish_test(bool failed) {
  if (is_rank()) {
    if (failed) exit_process(1);
    wait_for_next_test();
    return {};
  }
  if (!test_is_running_) return {};
  test_is_running_ = false;
  const std::string failures =
      wait_for([&](int rank) { return progress_->finished[rank] == progress_->test_number; });
  // The groups of a lost rank are unusable.
  if (!failures.empty()) kill_all();
  return failures;
}

// Ranks wait until all have finished the test: resources that one still holds could show in measurements of
// the next.
void PersistentRanks::wait_for_next_test() {
  progress_->finished[rank_] = test_number_;
  while (progress_->test_number == test_number_) test::sleep_seconds(kPoll);
  test_number_ = progress_->test_number;
  if (test_number_ != Progress::kShutDown) return;
  groups_.clear();
  exit_process(0);
}

std::string PersistentRanks::shut_down() {
  if (is_rank()) exit_process(1);  // a rank that left its test loop
  if (processes_.empty()) return {};
  progress_->test_number = Progress::kShutDown;
  return wait_for([](int) { return false; }, test::Stopwatch());
}

// Waits until, for each rank, finished(rank) holds or its process has exited. Returns a text that names the
// failed ranks. The time limit for ranks that do not finish starts at the first failure, or at `since`.
std::string PersistentRanks::wait_for(const std::function<bool(int rank)>& finished,
                                      std::optional<test::Stopwatch> since) {
  for (std::string failures;; test::sleep_seconds(kPoll)) {
    failures += reap();
    if (!failures.empty() && !since) since.emplace();
    const bool late = since && since->seconds() > test::kNoFaultDeadline;
    bool all = true;
    for (const Process& process : processes_) {
      if (finished(process.rank)) continue;
      all = false;
      if (late) kill(process.id, SIGKILL);
    }
    if (all) return failures;
  }
}

// Removes the processes that have exited. Returns a text that names those that failed.
std::string PersistentRanks::reap() {
  std::string failures;
  std::erase_if(processes_, [&](const Process& process) {
    int status = 0;
    const pid_t exited = waitpid(process.id, &status, WNOHANG);
    if (exited == 0) return false;
    const bool shutting_down = progress_->test_number == Progress::kShutDown;
    if (exited != process.id) {
      failures += str(" rank ", process.rank, " disappeared;");
    } else if (WIFSIGNALED(status)) {
      failures += str(" rank ", process.rank, " by signal ", WTERMSIG(status), ";");
    } else if (!shutting_down || status != 0) {
      failures += str(" rank ", process.rank, " with exit code ", WEXITSTATUS(status), ";");
    }
    return true;
  });
  return failures;
}

void PersistentRanks::kill_all() {
  for (const Process& process : processes_) kill(process.id, SIGKILL);
  for (const Process& process : processes_) waitpid(process.id, nullptr, 0);
  processes_.clear();
}

void PersistentRanks::exit_process(int status) {
  std::cout.flush();
  std::fflush(nullptr);
  _exit(status);
}

// ---- the ranks of a test program, kept in step with GoogleTest's loop over tests

namespace {

constexpr int kMaxRanks = 8;

class Listener : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& test) override {
    if (rank_ >= 0 && &test != program_ranks().current_test()) GTEST_SKIP() << "does not run on this rank";
  }

  void OnTestPartResult(const testing::TestPartResult& part) override {
    if (rank_ >= 0 && part.failed()) std::cerr << str("rank ", rank_, ": ", part) << std::flush;
  }

  void OnTestIterationEnd(const testing::UnitTest&, int iteration) override {
    if (iteration + 1 != testing::GTEST_FLAG(repeat)) return;
    const std::string failed = program_ranks().shut_down();
    if (!failed.empty()) ADD_FAILURE() << "failed:" << failed;
  }

  // Called in a rank's process: only the test process prints results and writes files.
  void act_as_rank(int rank) {
    rank_ = rank;
    testing::TestEventListeners& all = testing::UnitTest::GetInstance()->listeners();
    delete all.Release(all.default_result_printer());
    delete all.Release(all.default_xml_generator());
  }

 private:
  int rank_ = -1;
};

}  // namespace

// Never destroyed: the ranks have exited before the program ends.
PersistentRanks& program_ranks() {
  static auto* const ranks = [] {
    auto* const listener = new Listener;
    testing::UnitTest::GetInstance()->listeners().Append(listener);
    return new PersistentRanks(kMaxRanks, [listener](int rank) { listener->act_as_rank(rank); });
  }();
  return *ranks;
}

}  // namespace ferry::contract
