// One call of ranks that an engine connects: an exchange of blocks, then, if all ranks agree, one of
// messages.
#pragma once

#include <algorithm>
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
#include "backends/collective/message_hops.hpp"
#include "backends/cpu/link/peer_link.hpp"
#include "engine/engine.hpp"
#include "exchange/lane_counts.hpp"
#include "group/channel.hpp"
#include "group/control_block.hpp"

namespace ferry::collective {

// How far the ranks of this host have come with the calls of a lane.
//
// In the control block each rank has an entry for a lane: the lane's number, a call, and a step of it: 0 when
// it has posted the call, 2 t when it has begun transfer t, 2 t + 1 when it has the blocks of transfer t, and
// kDone when it has done its part of the call. Transfers are numbered from 1; to post a further exchange of
// the call takes a number too. If a rank has more lanes than
// entries, several lanes write one entry, which then holds what the last of them wrote.
class CallProgress {
 public:
  static constexpr int kDone = 255;

  // `lane`: RankState::number_lane(). Collective: the entries are valid once all ranks have constructed it.
  CallProgress(ControlBlock& control, int rank, int lane) : control_(control), rank_(rank), lane_(lane) {
    reach(0, 0);
  }

  void reach(std::uint64_t call, int step) const {
    // Release: a rank that reads the entry also sees what this rank did before.
    entry_of(rank_).store(entry(call, step), std::memory_order_release);
  }

  // This rank makes no more calls on the lane.
  void end() const {
    std::atomic<std::uint64_t>& mine = entry_of(rank_);
    std::uint64_t last = mine.load(std::memory_order_relaxed);
    // Another thread may write the entry for another lane.
    while (is_of_lane(last) && !mine.compare_exchange_weak(last, last | kEnded, std::memory_order_acq_rel)) {
    }
  }

  // True if `peer` makes no more calls on the lane and has not reached that step of `call`.
  bool has_ended_before(int peer, std::uint64_t call, int step) const {
    const std::uint64_t seen = entry_of(peer).load(std::memory_order_acquire);
    return is_of_lane(seen) && (seen & kEnded) != 0 && place_of(seen) < place_of(entry(call, step));
  }

  // Orders ranks by how far they have come. Empty: unknown, as for every rank of another host.
  std::optional<std::uint64_t> place(int peer) const {
    const std::uint64_t seen = entry_of(peer).load(std::memory_order_acquire);
    if (!is_of_lane(seen)) return std::nullopt;
    return place_of(seen);
  }
  // True if `peer` is known to be in a call.
  bool is_in_call(int peer) const {
    const std::optional<std::uint64_t> seen = place(peer);
    return seen && *seen >> kCallShift > 0 && (*seen & kStepMask) != kDone;
  }

  // True if `peer` has reached that step of that call, or a later one. Empty: unknown.
  std::optional<bool> has_reached(int peer, std::uint64_t call, int step) const {
    const std::optional<std::uint64_t> seen = place(peer);
    if (!seen) return std::nullopt;
    return *seen >= place_of(entry(call, step));
  }

 private:
  // 23 bits for the lane, one for kEnded, 32 for the call, 8 for the step.
  static constexpr int kLaneShift = 41, kCallShift = 8;
  static constexpr std::uint64_t kEnded = std::uint64_t{1} << 40, kStepMask = 0xFF;

  // Never 0, which is the entry of a rank of another host.
  std::uint64_t entry(std::uint64_t call, int step) const {
    return (static_cast<std::uint64_t>(lane_) + 1) << kLaneShift | (call & 0xFFFFFFFFu) << kCallShift |
           static_cast<std::uint64_t>(step == kDone ? kDone : std::min(step, kDone - 1));
  }
  bool is_of_lane(std::uint64_t seen) const { return seen >> kLaneShift == entry(0, 0) >> kLaneShift; }
  static constexpr std::uint64_t place_of(std::uint64_t seen) { return seen & (kEnded - 1); }
  std::atomic<std::uint64_t>& entry_of(int rank) const {
    EngineProgress& progress = control_.engine_progress(rank);
    return progress.lanes[lane_ % EngineProgress::kLanes];
  }

  ControlBlock& control_;
  const int rank_, lane_;
};

// How a lane reaches the ranks.
struct LaneConnection {
  std::unique_ptr<Communicator> communicator;
  int lane;
  std::int64_t summary_bytes;  // of a block's content that the user of the call fills in
  double deadline;
  std::shared_ptr<TransferThread> ordered = nullptr;  // of all lanes; null: lanes need no common order
  bool counts_waits = false;
};

// In a call all ranks exchange their blocks. If no rank has refused, all have made the same call and it
// carries messages, the messages follow (message_hops.hpp). All ranks read the same blocks, so all decide
// alike.
//
// wait() runs the exchange in the caller's thread; split calls, refusals and ordered lanes use the transfer
// thread. With ordered lanes every exchange runs in one thread
// for all lanes, and the first transfer of a call has the same size in all of them, whatever their exchanges
// are: so ranks that call in different order learn of it from the first blocks.
//
// begin(), post() and wait() are called in this order for each call, and refuse() in place of post(); an
// exception from begin() or wait() ends the call on this rank. A call may go on with a further exchange:
// go_on(), post(), wait(). One thread at a time.
class EngineCall {
 public:
  // Throws to end a wait.
  using Check = std::function<void()>;

  EngineCall(Rank rank, LaneConnection connection, std::unique_ptr<MessageHops> messages);
  ~EngineCall() { end(); }
  EngineCall(const EngineCall&) = delete;
  EngineCall& operator=(const EngineCall&) = delete;

  // Takes the lane's next call number. `goes_on`: the call has a further exchange.
  std::uint64_t begin(Operation operation, std::span<const ComparedOption> options, bool goes_on = false);
  // Begins the further exchange, of blocks with the same options.
  void go_on();
  std::uint64_t call() const { return call_; }
  MessageHops& messages() const { return *memory_->messages; }
  // Sets an option unknown at begin(); only from `prepare` of post().
  void set_option(int index, std::int64_t value) { options_[static_cast<std::size_t>(index)].value = value; }
  std::byte* summary_to(int peer) { return memory_->blocks.summary_to(peer); }
  const std::byte* summary_from(int peer) const { return memory_->blocks.summary_from(peer); }
  // `split`: the caller goes on, and calls wait() in the receive phase. `prepare`, if given, runs first in
  // the thread of the exchange: it finishes the messages and the summaries, and passes its argument to every
  // wait. If it throws, this rank refuses
  // the call and wait() rethrows.
  void post(bool split, std::function<void(const Check&)> prepare = {});
  // Blocks until the exchange is done. Runs it, if post() has not started it.
  void wait();
  // As Channel::refuse.
  void refuse(Operation operation, const ErrorRecord& error) noexcept;
  // Waits for an exchange that has been started. No call follows.
  void end() noexcept;
  const LaneWaits& waits() const { return waits_; }

 private:
  // Owned together, because a transfer that was given up may still use it.
  struct Memory {
    CallBlocks blocks;
    std::unique_ptr<MessageHops> messages;
  };

  using Clock = std::chrono::steady_clock;

  void begin_exchange();
  void finish_exchange();
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
  void transfer_counted(const AllToAllV& transfer, const Check& check);

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
  std::vector<ComparedOption> options_;
  std::optional<ErrorRecord> refusal_;  // with which this rank refuses the call
  bool begun_ = false;                  // and not posted yet
  bool goes_on_ = false;                // with a further exchange
  bool may_go_on_ = false;              // the exchange before that is done
  int posted_step_ = 0;                 // of CallProgress: the current exchange is posted
  std::function<void(const Check&)> prepare_;
  int transfers_ = 0;                // transfers that the exchange has begun
  bool exchanging_blocks_ = false;   // no messages yet
  Clock::time_point peers_checked_;  // the last time, in the thread of the exchange
  // First time a finished peer was missing here.
  std::optional<Clock::time_point> end_seen_;
  // When this rank began to let a peer give up first, after its own deadline.
  std::optional<Clock::time_point> overdue_since_;
  std::atomic<bool> exchanging_ = false;  // the exchange has begun
  // The steps of the exchange: the blocks, the messages, those of the second hop.
  std::atomic<Clock::time_point> step_begin_ = Clock::time_point();
  std::atomic<bool> in_second_hop_ = false;
  std::atomic<bool> overdue_ = false;  // the deadline of a wait for the thread's exchange has passed

  LaneWaits waits_;
  // Since when a thread waits for the exchange; max: none does.
  std::atomic<Clock::time_point> waiting_since_ = Clock::time_point::max();

  const bool ordered_;
  std::shared_ptr<TransferThread> thread_;   // null until needed
  std::future<std::exception_ptr> started_;  // the exchange that runs in the thread
};

// The link of host ranks that an engine connects: messages are packed into blocks, one for each pair of
// ranks.
class EngineLink final : public cpu::PeerLink {
 public:
  // Arguments as for EngineCall and MessageHops.
  EngineLink(const Rank& rank, LaneConnection connection, const HopOptions& hops,
             std::unique_ptr<HopMemory> memory)
      : has_relays_(hops.relays),
        call_(rank, std::move(connection),
              std::make_unique<MessageHops>(rank.topology(), rank.index(), hops, std::move(memory))) {}

  std::uint64_t begin(Operation operation, std::span<const ComparedOption> options, bool goes_on) override {
    return call_.begin(operation, options, goes_on);
  }
  void go_on() override { call_.go_on(); }
  std::uint64_t call() const override { return call_.call(); }
  std::byte* summary_to(int peer) override { return call_.summary_to(peer); }
  const std::byte* summary_from(int peer) const override { return call_.summary_from(peer); }
  bool packs() const override { return true; }
  void reserve(const cpu::Reservation& messages) override { call_.messages().reserve(messages); }
  bool has_relays() const override { return has_relays_; }
  std::byte* outgoing(cpu::Staging, int peer) override { return call_.messages().outgoing(peer); }
  const std::byte* incoming(cpu::Staging, int peer) const override { return call_.messages().incoming(peer); }
  std::int64_t incoming_bytes(int peer) const override { return call_.messages().incoming_bytes(peer); }
  Traffic sent_within_node() const override { return call_.messages().within_node(); }
  Traffic sent_between_nodes() const override { return call_.messages().between_nodes(); }
  void post(bool split) override { call_.post(split); }
  void wait() override { call_.wait(); }
  void post_chunk(std::int64_t) override {}
  void wait_chunk(int, std::int64_t) override {}
  void refuse(Operation operation, const Error& error) noexcept override {
    call_.refuse(operation, ErrorRecord::of(error));
  }
  const LaneWaits& waits() const override { return call_.waits(); }
  void end() noexcept override { call_.end(); }

 private:
  const bool has_relays_;
  EngineCall call_;
};

}  // namespace ferry::collective
