// The process of a rank that this process has forked.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace ferry {

// Kills and reaps the process when it is destroyed, unless it was reaped before.
class RankProcess {
 public:
  // Throws SystemError if the process cannot be watched; it is killed and reaped then.
  RankProcess(int rank, pid_t process);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  int rank() const { return rank_; }
  pid_t process() const { return process_; }
  int descriptor() const { return descriptor_; }  // readable once the process has ended
  bool running() const { return !status_; }

  // Whether a signal such as SIGSTOP has stopped the process.
  bool stopped() const;

  void kill(const std::string& why);
  bool killed_by_launcher() const { return !why_killed_.empty(); }
  const std::string& why_killed() const { return why_killed_; }

  // Blocks until the process has ended.
  void reap();

  // After reap(): how it ended, such as "rank 1 (process 4711) exited with status 3".
  std::string describe_exit() const;
  bool succeeded() const { return status_ && *status_ == 0; }
  bool signalled() const;  // it was killed by a signal

  // The process ended without leaving the group, and not because the launcher killed it.
  bool died() const { return died_; }
  void set_died() { died_ = true; }

 private:
  int rank_;
  pid_t process_;
  int descriptor_;
  std::string why_killed_;  // empty: not killed by the launcher
  bool died_ = false;
  std::optional<int> status_;  // of waitpid(), once it is reaped
};

}  // namespace ferry
