// Detects that the process of a peer has died without leaving the group.
//
// Two sources. The peer's liveness lock is marked as soon as the process is killed. Its pidfd becomes
// readable later, when the last thread is gone, but also covers a process that does not hold its lock yet or
// has released it.
#pragma once

#include <mutex>
#include <vector>

namespace ferry {

class ControlBlock;

// Also true for a process that has ended and is not reaped yet. Never blocks.
bool has_ended(int process);

class ProcessMonitor {
 public:
  explicit ProcessMonitor(const ControlBlock& control);
  ~ProcessMonitor();
  ProcessMonitor(const ProcessMonitor&) = delete;  // owns file descriptors
  ProcessMonitor& operator=(const ProcessMonitor&) = delete;

  // A rank other than `excused` whose process has ended (a zombie counts) or is ending, without having left
  // the group; -1: none. Never blocks. Ranks that are threads of this process are skipped: their process is
  // this one.
  int find_dead_rank(int excused = -1);

 private:
  bool open_pidfd(int rank, int this_process);
  bool ended(int rank, int this_process);

  const ControlBlock& control_;
  std::mutex mutex_;         // threads of several lanes may wait at once
  std::vector<int> pidfds_;  // [ranks], -1: not opened
};

}  // namespace ferry
