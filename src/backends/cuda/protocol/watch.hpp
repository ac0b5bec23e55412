// The host's eye on kernels that wait: it ends them when the group fails, and fails the group when they do.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "backends/cuda/protocol/report.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

// A thread that lives as long as the object and
// - sets report->abort once the group has failed, whoever failed it,
// - fails the group with report->timeout once report->timed_out is set, so that all ranks end,
// - fails the group when the process of a peer has ended without a word.
// The first two within some 20 ms, the last within 200. A peer that has left the group is missing only to
// those who wait for it: their deadline finds it.
class Watch {
 public:
  // `report` is host memory, zero at first, that outlives the object; kernels may write it at any time.
  // `deadline`: how long their waits last, in seconds, for the message. SystemError if no thread can be had.
  Watch(const Rank& rank, HostReport* report, double deadline);
  ~Watch();  // waits for the thread, which ends at once
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  bool group_has_failed();
  bool sleep();

  Rank rank_;
  HostReport* report_;
  double deadline_;
  Clock::time_point next_look_ = Clock::now();  // at the peers' processes
  std::mutex mutex_;
  std::condition_variable stopping_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace ferry::cuda
