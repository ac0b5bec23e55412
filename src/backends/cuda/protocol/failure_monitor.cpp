#include "backends/cuda/protocol/failure_monitor.hpp"

#include <exception>
#include <system_error>

#include "base/errors.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/rank_state.hpp"

namespace ferry::cuda {

namespace {

constexpr std::chrono::milliseconds kPollInterval{20};
constexpr std::chrono::milliseconds kProcessCheckInterval{200};  // a check is a system call for each peer

}  // namespace

FailureMonitor::FailureMonitor(const Rank& rank, HostSignals* signals, double deadline)
    : rank_(rank), signals_(signals), deadline_(deadline), epoch_(rank.state().control().epoch()) {
  const ScopedSignalBlock scoped_signal_block;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw SystemError(str("cannot start the thread that watches the GPU: ", error.what()),
                      error.code().value());
  }
}

FailureMonitor::~FailureMonitor() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_requested_.notify_one();
  thread_.join();
}

void FailureMonitor::run() {
  for (bool stopping = false; !group_has_failed();) {
    if (stopping) return;
    stopping = !sleep();  // then polls once more: a kernel may have timed out just now
  }
  // Release: a reader of the abort word also sees the failure. The failure is final, so the thread may end.
  store_release(signals_->abort, epoch_);
}

bool FailureMonitor::group_has_failed() {
  RankState& state = rank_.state();
  try {
    if (const auto timeout = timeout_of(*signals_, epoch_, rank_.topology()))
      state.time_out(*timeout, deadline_);
    if (Clock::now() < next_process_check_) return state.control().failed();
    next_process_check_ = Clock::now() + kProcessCheckInterval;
    WaitRecord no_wait;
    no_wait.rank = state.index();
    return state.check_peers(no_wait);
  } catch (...) {
    // Without the check, a death would stay unnoticed until the kernels' deadline: fail now.
    state.control().fail(state.index(), ErrorRecord::of(std::current_exception()));
    return true;
  }
}

bool FailureMonitor::sleep() {
  std::unique_lock lock(mutex_);
  return !stop_requested_.wait_for(lock, kPollInterval, [this] { return stop_; });
}

}  // namespace ferry::cuda
