// One call of ranks that an engine connects: an exchange of blocks, then, if all ranks agree, one of
// messages.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/collective/call_blocks.hpp"
#include "backends/collective/call_progress.hpp"
#include "backends/collective/message_hops.hpp"
#include "engine/engine.hpp"
#include "exchange/lane_counts.hpp"
#include "group/channel.hpp"

namespace ferry::collective {

// In a call all ranks exchange their blocks. If no rank has refused, all have made the same call and it
// carries messages, the messages follow (message_hops.hpp). All ranks read the same blocks, so all decide
// alike.
//
// The exchange runs in the caller's thread, in wait(). After a send phase it runs in a thread, and so does
// that of a refusal, which its rank does not wait for. With ordered lanes every exchange runs in one thread
// for all lanes, and the first transfer of a call has the same size in all of them, whatever their exchanges
// are: so ranks that call in different order learn of it from the first blocks.
//
// begin(), post() and wait() are called in this order for each call, and refuse() in place of post(); an
// exception from begin() or wait() ends the call on this rank. One thread at a time.
class EngineCall {
 public:
  // Throws to end a wait.
  using Check = std::function<void()>;

  // `ordered`: the thread of all lanes; null: lanes need no common order. `summary_bytes`: bytes of a block's
  // content that the user of this class fills in.
  EngineCall(Rank rank, std::unique_ptr<Communicator> communicator, int lane, std::int64_t summary_bytes,
             std::unique_ptr<MessageHops> messages, double deadline, std::shared_ptr<TransferThread> ordered);
  ~EngineCall() { end(); }
  EngineCall(const EngineCall&) = delete;
  EngineCall& operator=(const EngineCall&) = delete;

  // Takes the lane's next call number.
  std::uint64_t begin(Operation operation, std::span<const CallOption> options);
  std::uint64_t call() const { return call_; }
  // Replaces an option that the caller did not know at begin(). In post()'s `prepare`.
  void set_option(int index, std::int64_t value) { options_[static_cast<std::size_t>(index)].value = value; }
  std::byte* summary_to(int peer) { return memory_->blocks.summary_to(peer); }
  const std::byte* summary_from(int peer) const { return memory_->blocks.summary_from(peer); }
  // `split`: the caller goes on, and calls wait() in the receive phase. `prepare`, if given, runs first in
  // the thread of the exchange: it finishes the messages and the summaries, and passes its argument to every
  // wait. What it throws refuses the call, and wait() throws it on this rank.
  void post(bool split, std::function<void(const Check&)> prepare = {});
  // Blocks until the exchange is done. Runs it, if post() has not started it.
  void wait();
  // As Channel::refuse.
  void refuse(Operation operation, const ErrorRecord& error) noexcept;
  // Waits for an exchange that has been started. No call follows.
  void end() noexcept;

 private:
  // Owned together, because a transfer that was given up may still use it.
  struct Memory {
    CallBlocks blocks;
    std::unique_ptr<MessageHops> messages;
  };

  using Clock = std::chrono::steady_clock;

  void start_in_thread();
  void finish_started(Operation next);
  void wait_for_started();
  bool is_overdue(Clock::time_point begin) const;
  void begin_step();
  void exchange_here();
  void exchange(const Check& check);
  std::exception_ptr prepare(const Check& check);
  void set_refusal(const ErrorRecord& error);
  CallBlocks::Call terms() const;
  void exchange_blocks(const Check& check);
  void exchange_messages(const Check& check);
  void transfer(const AllToAllV& transfer, const Check& check);

  // What ends its waits: engine_call_waits.cpp.
  void check_group();
  bool find_departed_rank();
  void fail_by_departure(int peer, const char* how);
  [[noreturn]] void throw_failure() const;
  bool has_lost_finished_rank() const;
  void check_in_thread();
  WaitRole role(int peer) const;  // in the current transfer
  WaitRecord missing() const;
  void give_up();
  [[noreturn]] void time_out(WaitRecord waited) const;
  WaitRecord record() const;
  [[noreturn]] void fail_transfer(const std::string& fault) const;
  [[noreturn]] void fail_group(const std::exception_ptr& error) const;

  const Rank rank_;
  const int me_, ranks_, lane_, lane_number_;
  const CallProgress progress_;
  const std::int64_t first_bytes_;
  const double deadline_;
  const std::unique_ptr<Communicator> communicator_;
  const std::shared_ptr<Memory> memory_;

  // The current call.
  std::uint64_t call_ = 0;
  Operation operation_ = Operation::none;
  std::vector<CallOption> options_;
  std::optional<ErrorRecord> refusal_;  // with which this rank refuses the call
  bool begun_ = false;                  // and not posted yet
  std::function<void(const Check&)> prepare_;
  int transfers_ = 0;                // transfers that the exchange has begun
  bool exchanging_blocks_ = false;   // no messages yet
  Clock::time_point peers_checked_;  // the last time, in the thread of the exchange
  // When a peer was first seen that makes no more calls, and is missing in this one.
  std::optional<Clock::time_point> end_seen_;
  // When this rank began to let a peer give up first, after its own deadline.
  std::optional<Clock::time_point> overdue_since_;
  std::atomic<bool> exchanging_ = false;  // the exchange has begun
  // The steps of the exchange: the blocks, the messages, those of the second hop.
  std::atomic<Clock::time_point> step_begin_ = Clock::time_point();
  std::atomic<bool> in_second_hop_ = false;
  std::atomic<bool> overdue_ = false;  // the deadline of a wait for the thread's exchange has passed

  const bool ordered_;
  std::shared_ptr<TransferThread> thread_;   // null until needed
  std::future<std::exception_ptr> started_;  // the exchange that runs in the thread
};

}  // namespace ferry::collective
