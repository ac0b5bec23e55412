// The lock that tells of a process's end, and the watch that looks at it.
#include "group/liveness_lock.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "group/control_block.hpp"
#include "group/no_signals.hpp"
#include "group/process_monitor.hpp"
#include "memory/mapping.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/shared_value.hpp"

namespace ferry::test {
namespace {

template <class Condition>
bool comes_true(double seconds, const Condition& condition) {
  for (const Stopwatch watch; !condition();) {
    if (watch.seconds() > seconds) return false;
    sleep_seconds(0.0005);
  }
  return true;
}

// A process that does its work and stays, until it is killed.
class Child {
 public:
  explicit Child(const std::function<void()>& work) {
    const Seen<std::atomic<bool>> done;
    process_ = fork();
    if (process_ == 0) {
      work();
      *done = true;
      while (true) pause();
    }
    EXPECT_TRUE(comes_true(10, [&] { return done->load(); }));
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void kill() const { ::kill(process_, SIGKILL); }
  void end() {
    if (process_ <= 0) return;
    kill();
    waitpid(process_, nullptr, 0);
    process_ = 0;
  }

 private:
  pid_t process_;
};

// What becomes of a lock when a process takes it, does this and ends.
bool died_holding(const std::function<void(std::unique_ptr<RobustLockOwner>)>& act) {
  const Seen<RobustLock> lock;
  run_process([&] { act(std::make_unique<RobustLockOwner>(*lock)); });
  return lock->owner_died();
}

TEST(RobustLocks, TellAllObserversOfAKill) {
  constexpr int kThreads = 3, kProcesses = 3;
  struct Shared {
    RobustLock lock;
    std::atomic<int> ready, noticed;
  };
  for (int round = 0; round < 10; ++round) {
    const Seen<Shared> shared;
    const auto observe = [&] {
      ++shared->ready;
      if (comes_true(10, [&] { return shared->lock.owner_died(); })) ++shared->noticed;
    };
    const Child owner([&] { new RobustLockOwner(shared->lock); });
    EXPECT_FALSE(shared->lock.owner_died());
    // Before there are threads: what one of them holds locked while another forks stays locked in the
    // process.
    std::vector<pid_t> processes;
    for (int i = 0; i < kProcesses; ++i) {
      processes.push_back(fork());
      if (processes.back() != 0) continue;
      observe();
      _exit(0);
    }
    std::vector<std::thread> observers;
    for (int i = 0; i < kThreads; ++i) observers.emplace_back(observe);
    EXPECT_TRUE(comes_true(10, [&] { return shared->ready == kThreads + kProcesses; }));
    owner.kill();
    EXPECT_TRUE(comes_true(0.1, [&] { return shared->noticed == kThreads + kProcesses; }));
    for (std::thread& observer : observers) observer.join();
    for (const pid_t process : processes) EXPECT_EQ(waitpid(process, nullptr, 0), process);
    EXPECT_TRUE(shared->lock.owner_died());  // it stays so
  }
}

TEST(RobustLocks, TellOfEveryEndButALetGoOne) {
  EXPECT_FALSE(died_holding([](std::unique_ptr<RobustLockOwner> owner) { owner.reset(); }));
  EXPECT_TRUE(died_holding([](const std::unique_ptr<RobustLockOwner>&) { _exit(0); }));
  EXPECT_TRUE(died_holding([](const std::unique_ptr<RobustLockOwner>&) { raise(SIGKILL); }));
  EXPECT_TRUE(
      died_holding([](const std::unique_ptr<RobustLockOwner>&) { execl("/bin/true", "true", nullptr); }));
}

TEST(RobustLocks, StayWithTheProcessThatTookThem) {
  const Seen<RobustLock> lock;
  auto owner = std::make_unique<RobustLockOwner>(*lock);
  const std::uint32_t held = lock->word;
  EXPECT_EQ(run_process([&] { owner.reset(); }), 0);
  EXPECT_NE(held, 0u);
  EXPECT_EQ(lock->word, held);
  owner.reset();
  EXPECT_EQ(lock->word, 0u);
}

TEST(RobustLocks, OfOneProcessAreManyAndTheirOwn) {
  const Seen<std::array<RobustLock, 3>> locks;
  Child child([&] {
    new RobustLockOwner((*locks)[0]);
    {
      const RobustLockOwner let_go((*locks)[1]);
    }
    new RobustLockOwner((*locks)[2]);
  });
  child.end();
  EXPECT_TRUE((*locks)[0].owner_died());
  EXPECT_FALSE((*locks)[1].owner_died());
  EXPECT_TRUE((*locks)[2].owner_died());
}

class ProcessWatches : public testing::Test {
 protected:
  GroupControl control_{Mapping::anonymous_shared(GroupControl::bytes(2)), 2};
  ProcessWatch watch_{control_};
};

TEST_F(ProcessWatches, FindAKilledOwner) {
  const Child child([&] {
    control_.enter(1);
    new RobustLockOwner(control_.lock(1));
  });
  EXPECT_EQ(watch_.find_device_error(), -1);
  child.kill();
  EXPECT_TRUE(comes_true(0.1, [&] { return watch_.find_device_error() == 1; }));
  EXPECT_EQ(ProcessWatch(control_).find_device_error(), 1);
  EXPECT_TRUE(watch_.ends_within(1, 0));
}

TEST_F(ProcessWatches, FindAProcessThatHadNoLockYet) {
  const Child child([&] { control_.enter(1); });
  EXPECT_EQ(watch_.find_device_error(), -1);
  child.kill();
  EXPECT_TRUE(comes_true(1, [&] { return watch_.find_device_error() == 1; }));
  EXPECT_FALSE(control_.lock(1).owner_died());
}

TEST_F(ProcessWatches, LetARankLeave) {
  Child child([&] {
    control_.enter(1);
    new RobustLockOwner(control_.lock(1));
    control_.leave(1);
  });
  child.end();
  EXPECT_TRUE(control_.lock(1).owner_died());
  EXPECT_EQ(watch_.find_device_error(), -1);
}

// A thread that keeps its process from ending: killed, it stays until the parent, which traces it, has waited
// for it. So does a thread that the GPU driver keeps. Its number, or -1 where nobody may be traced.
pid_t start_lingering_thread() {
  std::promise<pid_t> promise;
  std::future<pid_t> number = promise.get_future();
  const NoSignals no_signals;
  std::thread([promise = std::move(promise)]() mutable {
    promise.set_value(
        ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0 ? static_cast<pid_t>(syscall(SYS_gettid)) : -1);
    while (true) pause();
  }).detach();
  return number.get();
}

bool has_ended(pid_t process) {
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
  pollfd entry{descriptor, POLLIN, 0};
  const bool ended = poll(&entry, 1, 0) != 0;
  close(descriptor);
  return ended;
}

TEST(RobustLocks, TellOfAKillWhileTheProcessIsStillThere) {
  struct Notes {
    std::atomic<int> process, thread, noticed;
  };
  const Seen<Notes> notes;
  const auto body = [&](const Rank& rank) {
    Line line(rank, 5);
    line.exchange();
    rank.barrier();
    if (rank.index() == 1) {
      notes->process = getpid();
      notes->thread = start_lingering_thread();
      raise(SIGKILL);
    }
    const Stopwatch watch;
    const auto error = thrown<PeerLostError>([&] { line.exchange(); });
    FERRY_CHECK(watch.seconds() < 1.0, str(watch.seconds()));
    FERRY_CHECK(error.record.peer == 1, describe(error.record));
    ++notes->noticed;
  };
  // This thread only sleeps while the other one forks: what it held locked would stay so in the processes.
  std::atomic<bool> sleeps = false;
  std::thread parent([&] {
    while (!sleeps) std::this_thread::yield();
    EXPECT_ANY_THROW(run_ranks(Kind::custom_processes, 3, 5, body));
  });
  sleeps = true;
  comes_true(10, [&] { return notes->noticed == 2 || notes->thread < 0; });
  bool was_there = false;
  if (notes->thread > 0) {
    was_there = !has_ended(notes->process);
    waitpid(notes->thread, nullptr, __WALL);
  }
  parent.join();
  if (notes->thread < 0) GTEST_SKIP() << "this system lets us trace nobody";
  EXPECT_EQ(notes->noticed, 2);
  EXPECT_TRUE(was_there);
}

}  // namespace
}  // namespace ferry::test
