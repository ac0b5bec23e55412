// How a rank waits for a flag in shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "ferry/error.hpp"
#include "group/control_block.hpp"
#include "group/process_monitor.hpp"

namespace ferry {

// Whether the calling thread is to give up its wait, as when somebody presses Ctrl-C. Asked four times a
// second and after every signal; what waits for less never asks. Null: nobody says so.
inline std::atomic<bool (*)()> wait_is_unwanted = nullptr;

// A wait ends when `flag` has reached a value, or `instead` has (null: none).
struct Signal {
  const std::atomic<std::uint64_t>* flag;
  const std::atomic<std::uint64_t>* instead = nullptr;

  // Acquire for what lies behind the flag; sequentially consistent for the sake of WakeEvent.
  bool reached(std::uint64_t value) const {
    return flag->load(std::memory_order_seq_cst) >= value ||
           (instead != nullptr && instead->load(std::memory_order_seq_cst) >= value);
  }
};

class Waiter {
 public:
  // `local_ranks`: how many ranks share this host's processors.
  Waiter(GroupControl& control, int rank, int local_ranks);

  // Blocks until the signal has reached record.expected. Otherwise fails the group with `record` (or meets
  // its failure) and throws that. Threads of several lanes may wait at once.
  void wait(const Signal& signal, const WaitRecord& record, double deadline);

  // For when something of record.peer is not there: if its process has ended, or is just ending, fails the
  // group with `record` and throws that.
  void require_process(const WaitRecord& record);

  // One look at the peers, for those who wait by other means: if a process has ended without a word, or
  // record.peer (-1: none) has left, fails the group with `record`, the culprit as its peer (Operation::none:
  // nobody waited). True once the group has failed, for whatever reason. Never blocks; any thread.
  bool look(const WaitRecord& record);

  // Fails the group: `record` waited for `deadline` seconds in vain. Any thread.
  void time_out(const WaitRecord& record, double deadline);

 private:
  struct Loss;

  bool spin(const Signal& signal, std::uint64_t value) const;
  bool sleep(const Signal& signal, std::uint64_t value, double seconds);
  Loss find_loss(int peer);
  std::string death_of(int rank) const;
  void fail(ErrorRecord::Kind kind, const WaitRecord& record, const std::string& reason);

  GroupControl& control_;
  int rank_;
  int spins_;
  ProcessWatch watch_;
};

}  // namespace ferry
