#include "backends/cuda/protocol/watch.hpp"

#include <atomic>
#include <exception>
#include <system_error>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/error_record.hpp"
#include "group/no_signals.hpp"
#include "group/rank_state.hpp"

namespace ferry::cuda {

namespace {

constexpr std::chrono::milliseconds kInterval{20};
constexpr std::chrono::milliseconds kLookInterval{200};  // a look is a system call for each peer

}  // namespace

Watch::Watch(const Rank& rank, HostReport* report, double deadline)
    : rank_(rank), report_(report), deadline_(deadline) {
  const NoSignals no_signals;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw SystemError(str("cannot start the thread that watches the GPU: ", error.what()),
                      error.code().value());
  }
}

Watch::~Watch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopping_.notify_one();
  thread_.join();
}

void Watch::run() {
  for (bool stopping = false; !group_has_failed();) {
    if (stopping) return;
    stopping = !sleep();  // one more look: a kernel may have ended by its deadline a moment ago
  }
  // Release: whoever sees it also sees the failure. Nothing is left to watch: a failure is final.
  std::atomic_ref(report_->abort).store(1, std::memory_order_release);
}

bool Watch::group_has_failed() {
  RankState& state = rank_.state();
  try {
    // Acquire: the kernel stores the record before the mark, which it releases to the host.
    if (std::atomic_ref(report_->timed_out).load(std::memory_order_acquire) != 0) {
      state.time_out(report_->timeout, deadline_);
    }
    if (Clock::now() < next_look_) return state.control().failed();
    next_look_ = Clock::now() + kLookInterval;
    WaitRecord nobody_waits;
    nobody_waits.rank = state.index();
    return state.look(nobody_waits);
  } catch (...) {
    // Peers cannot be watched: a death would go unseen for as long as kernels wait.
    state.control().fail(state.index(), ErrorRecord::of(std::current_exception()));
    return true;
  }
}

// False when the object ends.
bool Watch::sleep() {
  std::unique_lock lock(mutex_);
  return !stopping_.wait_for(lock, kInterval, [this] { return stop_; });
}

}  // namespace ferry::cuda
