// A host thread that links kernels to the group's failures: it aborts waiting kernels when the group fails,
// and fails the group when a kernel's wait times out or a peer's process dies.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "backends/cuda/protocol/host_signals.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

// The thread lives as long as the object. It
// - sets signals->abort when the group has failed, on any rank and for any reason (within about 20 ms);
// - fails the group with signals->timeout when signals->timed_out is set, so that all ranks stop (20 ms);
// - fails the group when a peer's process has ended without leaving the group (200 ms).
// A peer that has left the group properly is no failure: a rank that still waits for it times out.
class FailureMonitor {
 public:
  // `signals`: zeroed host memory that outlives the object; kernels may write it at any time. `deadline`: the
  // kernels' deadline in seconds, for the error message. Throws SystemError if no thread can be started.
  FailureMonitor(const Rank& rank, HostSignals* signals, double deadline);
  ~FailureMonitor();  // stops the thread
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  bool group_has_failed();  // also fails it, if there is a reason
  bool sleep();             // false: the object is being destroyed

  Rank rank_;
  HostSignals* signals_;
  double deadline_;
  const std::uint64_t epoch_;  // which it watches
  Clock::time_point next_process_check_ = Clock::now();
  std::mutex mutex_;
  std::condition_variable stop_requested_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace ferry::cuda
