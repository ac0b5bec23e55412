// The liveness lock, and the process monitor that reads it.
#include "group/liveness.hpp"

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

#include "base/mapping.hpp"
#include "base/process.hpp"
#include "group/control_block.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

template <class Condition>
bool becomes_true(double seconds, const Condition& condition) {
  for (const Stopwatch watch; !condition();) {
    if (watch.seconds() > seconds) return false;
    sleep_seconds(0.0005);
  }
  return true;
}

// A process that runs `work` and then sleeps until it is killed.
class Child {
 public:
  explicit Child(const std::function<void()>& work) {
    const SharedValue<std::atomic<bool>> done;
    process_ = fork();
    if (process_ == 0) {
      work();
      *done = true;
      while (true) pause();
    }
    EXPECT_TRUE(becomes_true(10, [&] { return done->load(); }));
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

// Whether the lock is marked after a process has taken it, run `act` and ended.
bool is_marked_after(const std::function<void(std::unique_ptr<LivenessLockHolder>)>& act) {
  const SharedValue<LivenessLock> lock;
  run_process([&] { act(std::make_unique<LivenessLockHolder>(*lock)); });
  return lock->holder_died();
}

TEST(LivenessLocks, AreMarkedForAllObserversAfterAKill) {
  constexpr int kThreads = 3, kProcesses = 3;
  struct Shared {
    LivenessLock lock;
    std::atomic<int> ready, noticed;
  };
  for (int round = 0; round < 10; ++round) {
    const SharedValue<Shared> shared;
    const auto observe = [&] {
      ++shared->ready;
      if (becomes_true(10, [&] { return shared->lock.holder_died(); })) ++shared->noticed;
    };
    const Child holder([&] { new LivenessLockHolder(shared->lock); });
    EXPECT_FALSE(shared->lock.holder_died());
    // Forks before starting threads: a mutex that a thread holds during a fork stays locked in the child.
    std::vector<pid_t> processes;
    for (int i = 0; i < kProcesses; ++i) {
      processes.push_back(fork());
      if (processes.back() != 0) continue;
      observe();
      _exit(0);
    }
    std::vector<std::thread> observers;
    for (int i = 0; i < kThreads; ++i) observers.emplace_back(observe);
    EXPECT_TRUE(becomes_true(10, [&] { return shared->ready == kThreads + kProcesses; }));
    holder.kill();
    EXPECT_TRUE(becomes_true(0.1, [&] { return shared->noticed == kThreads + kProcesses; }));
    for (std::thread& observer : observers) observer.join();
    for (const pid_t process : processes) EXPECT_EQ(waitpid(process, nullptr, 0), process);
    EXPECT_TRUE(shared->lock.holder_died());  // the mark stays
  }
}

TEST(LivenessLocks, AreMarkedAfterEveryEndExceptARelease) {
  EXPECT_FALSE(is_marked_after([](std::unique_ptr<LivenessLockHolder> holder) { holder.reset(); }));
  EXPECT_TRUE(is_marked_after([](const std::unique_ptr<LivenessLockHolder>&) { _exit(0); }));
  EXPECT_TRUE(is_marked_after([](const std::unique_ptr<LivenessLockHolder>&) { raise(SIGKILL); }));
  EXPECT_TRUE(is_marked_after(
      [](const std::unique_ptr<LivenessLockHolder>&) { execl("/bin/true", "true", nullptr); }));
}

TEST(LivenessLocks, StayHeldWhenAForkedCopyIsDestroyed) {
  const SharedValue<LivenessLock> lock;
  auto holder = std::make_unique<LivenessLockHolder>(*lock);
  const std::uint32_t held = lock->word;
  EXPECT_EQ(run_process([&] { holder.reset(); }), 0);
  EXPECT_NE(held, 0u);
  EXPECT_EQ(lock->word, held);
  holder.reset();
  EXPECT_EQ(lock->word, 0u);
}

TEST(LivenessLocks, OfOneProcessAreIndependent) {
  const SharedValue<std::array<LivenessLock, 3>> locks;
  Child child([&] {
    new LivenessLockHolder((*locks)[0]);
    {
      const LivenessLockHolder released((*locks)[1]);
    }
    new LivenessLockHolder((*locks)[2]);
  });
  child.end();
  EXPECT_TRUE((*locks)[0].holder_died());
  EXPECT_FALSE((*locks)[1].holder_died());
  EXPECT_TRUE((*locks)[2].holder_died());
}

class ProcessMonitors : public testing::Test {
 protected:
  ControlBlock control_{Mapping::anonymous_shared(ControlBlock::bytes(2)), 2};
  ProcessMonitor monitor_{control_};
};

TEST_F(ProcessMonitors, FindARankWhoseHolderWasKilled) {
  const Child child([&] {
    control_.join(1);
    new LivenessLockHolder(control_.liveness_lock(1));
  });
  EXPECT_EQ(monitor_.find_dead_rank(), -1);
  child.kill();
  EXPECT_TRUE(becomes_true(0.1, [&] { return monitor_.find_dead_rank() == 1; }));
  EXPECT_EQ(ProcessMonitor(control_).find_dead_rank(), 1);
}

TEST_F(ProcessMonitors, FindADeadProcessWithoutALock) {
  const Child child([&] { control_.join(1); });
  EXPECT_EQ(monitor_.find_dead_rank(), -1);
  child.kill();
  EXPECT_TRUE(becomes_true(1, [&] { return monitor_.find_dead_rank() == 1; }));
  EXPECT_FALSE(control_.liveness_lock(1).holder_died());
}

TEST_F(ProcessMonitors, IgnoreARankThatHasLeft) {
  Child child([&] {
    control_.join(1);
    new LivenessLockHolder(control_.liveness_lock(1));
    control_.leave(1);
  });
  child.end();
  EXPECT_TRUE(control_.liveness_lock(1).holder_died());
  EXPECT_EQ(monitor_.find_dead_rank(), -1);
}

// Starts a thread that keeps its killed process from ending, as a thread in the GPU driver does: the parent
// traces it, so it stays until the parent has waited for it. Returns its number; -1: tracing is not allowed.
pid_t start_lingering_thread() {
  std::promise<pid_t> promise;
  std::future<pid_t> number = promise.get_future();
  const ScopedSignalBlock scoped_signal_block;
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

TEST(LivenessLocks, AreMarkedWhileTheKilledProcessStillExists) {
  struct Shared {
    std::atomic<int> process, thread, noticed;
  };
  const SharedValue<Shared> shared;
  const auto body = [&](const Rank& rank) {
    TestLane lane(rank, 5);
    lane.exchange();
    rank.barrier();
    if (rank.index() == 1) {
      shared->process = getpid();
      shared->thread = start_lingering_thread();
      raise(SIGKILL);
    }
    const Stopwatch watch;
    const auto error = expect_thrown<PeerLostError>([&] { lane.exchange(); });
    FERRY_CHECK(watch.own_seconds() < 1.0, str(watch.own_seconds()));
    FERRY_CHECK(error.record.peer == 1, describe(error.record));
    ++shared->noticed;
  };
  // This thread only sleeps while the other one forks: a mutex that it held would stay locked in the
  // children.
  std::atomic<bool> sleeps = false;
  std::thread parent([&] {
    while (!sleeps) std::this_thread::yield();
    EXPECT_ANY_THROW(run_ranks(GroupKind::custom_processes, 3, 5, body));
  });
  sleeps = true;
  becomes_true(10, [&] { return shared->noticed == 2 || shared->thread < 0; });
  bool still_existed = false;
  if (shared->thread > 0) {
    still_existed = !has_ended(shared->process);
    waitpid(shared->thread, nullptr, __WALL);
  }
  parent.join();
  if (shared->thread < 0) GTEST_SKIP() << "this system does not allow tracing";
  EXPECT_EQ(shared->noticed, 2);
  EXPECT_TRUE(still_existed);
}

}  // namespace
}  // namespace ferry::test
