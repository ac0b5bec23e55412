#include "backends/collective/engine_call.hpp"

#include <cstring>
#include <utility>

#include "base/callback_thread.hpp"
#include "base/text.hpp"
#include "group/rank_state.hpp"

namespace ferry::collective {
namespace {

constexpr std::chrono::milliseconds kCheckPeriod(10);
constexpr std::chrono::milliseconds kInterruptPeriod(250);

// How much longer than its deadline a rank waits for what a relay forwards, in seconds: at most, and as a
// part of the deadline. The relay's own wait for the rank before it began about then, and must end first.
constexpr double kMostExtraSeconds = 0.5, kExtraPart = 0.25;

}  // namespace

EngineCall::EngineCall(Rank rank, LaneConnection connection, std::unique_ptr<MessageHops> messages)
    : rank_(std::move(rank)),
      me_(rank_.index()),
      ranks_(rank_.size()),
      lane_(connection.lane),
      lane_number_(rank_.state().number_lane()),
      progress_(rank_.state().control(), me_, lane_number_),
      first_bytes_(connection.communicator->first_bytes()),
      deadline_(connection.deadline),
      communicator_(std::move(connection.communicator)),
      memory_(std::make_shared<Memory>(Memory{
          .blocks = CallBlocks(me_, ranks_, connection.summary_bytes, messages->tables(), first_bytes_),
          .messages = std::move(messages)})),
      waits_(connection.counts_waits ? ranks_ : 0),
      ordered_(connection.ordered != nullptr),
      thread_(std::move(connection.ordered)) {}

void EngineCall::end() noexcept {
  try {
    finish_started(operation_);
  } catch (...) {
    started_ = {};  // abandoned: the group has failed, which every later call of the group reports
  }
  progress_.end();
}

std::uint64_t EngineCall::begin(Operation operation, std::span<const ComparedOption> options, bool goes_on) {
  CallbackScope::require_none("an operation of an exchange");
  finish_started(operation);
  ++call_;
  operation_ = operation;
  options_.assign(options.begin(), options.end());
  goes_on_ = goes_on;
  transfers_ = posted_step_ = 0;
  begin_exchange();
  return call_;
}

void EngineCall::go_on() {
  goes_on_ = false;
  posted_step_ = 2 * ++transfers_;
  begin_exchange();
}

void EngineCall::begin_exchange() {
  may_go_on_ = false;
  refusal_.reset();
  memory_->messages->clear();
  prepare_ = {};
  exchanging_ = overdue_ = exchanging_blocks_ = in_second_hop_ = false;
  step_begin_ = Clock::time_point();
  waiting_since_ = Clock::time_point::max();
  end_seen_.reset();
  overdue_since_.reset();
  begun_ = true;
}

// Waits for the previous exchange; only a group failure is rethrown: wait() threw what ended the call, or it
// concerns only the peers. `next`: the operation of the call
// that would.
void EngineCall::finish_started(Operation next) {
  if (started_.valid()) {
    wait_for_started();
    started_ = {};
  }
  const ControlBlock& control = rank_.state().control();
  if (control.failed()) {
    control.throw_failure({next, call_ + 1, me_, -1, call_ + 1, call_}, &rank_.topology());
  }
}

void EngineCall::post(bool split, std::function<void(const Check&)> prepare) {
  begun_ = false;
  prepare_ = std::move(prepare);
  progress_.reach(call_, posted_step_);
  if (split || (ordered_ && !communicator_->gives_up_at_once())) start_in_thread();
}

void EngineCall::wait() {
  finish_exchange();
  may_go_on_ = goes_on_;
}

void EngineCall::finish_exchange() {
  if (!started_.valid()) {
    if (!ordered_) return exchange_here();
    if (thread_->try_run([this] { exchange_here(); })) return;
    start_in_thread();
  }
  wait_for_started();
  if (const std::exception_ptr error = started_.get()) std::rethrow_exception(error);
}

// In the calling thread.
void EngineCall::exchange_here() {
  const Clock::time_point begin = Clock::now();
  Clock::time_point last_interrupt_check = begin;
  waiting_since_ = begin;
  exchange([&] {
    check_group();
    if (is_overdue(begin)) give_up();
    if (Clock::now() - last_interrupt_check < kInterruptPeriod) return;
    last_interrupt_check = Clock::now();
    if (rank_.state().check_interrupt(record())) {
      rank_.state().control().throw_failure(record(), &rank_.topology());
    }
  });
}

void EngineCall::refuse(Operation operation, const ErrorRecord& error) noexcept {
  try {
    if (may_go_on_) {
      go_on();
    } else if (!begun_) {
      begin(operation, {});
    }
    set_refusal(error);
    prepare_ = {};
    begun_ = false;
    progress_.reach(call_, posted_step_);
    start_in_thread();
  } catch (...) {
    return;  // the group has failed: no peer waits for this call, and the next begin() throws the failure
  }
}

void EngineCall::start_in_thread() {
  if (!thread_) thread_ = std::make_shared<TransferThread>();
  started_ = thread_->submit([this] { exchange([this] { check_in_thread(); }); });
}

// The exchange itself has no deadline: there is no deadline until someone waits: a peer may start its send
// phase any time while nobody waits. A wait that ends fails the group, which ends the exchange.
void EngineCall::wait_for_started() {
  const Clock::time_point begin = Clock::now();
  Clock::time_point last_interrupt_check = begin;
  waiting_since_ = begin;
  while (started_.wait_for(kCheckPeriod) != std::future_status::ready) {
    const bool failed = rank_.state().control().failed();
    if (is_overdue(begin)) {
      // The thread knows which rank is missing, unless it serves another lane.
      overdue_ = true;
      if (!exchanging_ && !failed) rank_.state().time_out(record(), deadline_);
    }
    if (failed) continue;
    if (Clock::now() - last_interrupt_check < kInterruptPeriod) continue;
    last_interrupt_check = Clock::now();
    rank_.state().check_interrupt(record());
  }
}

// Returns whether a wait that began at `begin` has exceeded its deadline. The deadline counts from the
// beginning of the current step: a step ends only when all ranks have reached it. So a relay and the ranks
// that wait for it start counting together.
bool EngineCall::is_overdue(Clock::time_point begin) const {
  const double extra = in_second_hop_ ? std::min(kMostExtraSeconds, kExtraPart * deadline_) : 0;
  const WaitLimit limit{.seconds = deadline_ + extra, .since = std::max(begin, step_begin_.load())};
  return limit.seconds_left() <= 0;
}

void EngineCall::begin_step() {
  step_begin_ = Clock::now();
  in_second_hop_ = memory_->messages->in_second_hop();
}

void EngineCall::exchange(const Check& check) {
  exchanging_ = true;
  const std::exception_ptr failure = prepare(check);
  memory_->blocks.write(terms(), *memory_->messages);
  exchanging_blocks_ = true;
  try {
    exchange_blocks(check);
  } catch (...) {
    if (failure) std::rethrow_exception(failure);  // the first error of this rank
    throw;
  }
  exchanging_blocks_ = false;
  if (!refusal_) {
    memory_->blocks.require_agreement(terms());
    if (memory_->messages->has_messages()) exchange_messages(check);
  }
  if (!goes_on_) progress_.reach(call_, CallProgress::kDone);
  if (failure) std::rethrow_exception(failure);
}

// Finishes the messages and the summaries. If that throws, refuses the call, so that the blocks tell the
// peers, on other hosts too, and returns the exception.
std::exception_ptr EngineCall::prepare(const Check& check) {
  if (!prepare_) return nullptr;
  try {
    prepare_(check);
    return nullptr;
  } catch (...) {
    if (rank_.state().control().failed()) throw;  // the group's failure, which the peers have too
    set_refusal(ErrorRecord::of(std::current_exception()));
    return std::current_exception();
  }
}

void EngineCall::set_refusal(const ErrorRecord& error) {
  refusal_ = error;
  goes_on_ = false;
  // Whatever this rank throws, the peers throw an error of Ferry's.
  if (refusal_->kind == ErrorRecord::Kind::other) refusal_->kind = ErrorRecord::Kind::system;
  memory_->messages->clear();
}

CallBlocks::Call EngineCall::terms() const {
  return {.lane = lane_,
          .lane_number = lane_number_,
          .terms = {me_, rank_.state().control().epoch(), call_, operation_, options_},
          .refusal = refusal_ ? &*refusal_ : nullptr};
}

// A rank has finished a transfer of blocks only when it has what its peers sent: until then its peers must
// not rely on it.
void EngineCall::exchange_blocks(const Check& check) {
  const CallBlocks& blocks = memory_->blocks;
  const CallBlocks::Call mine = terms();
  const bool in_parts = ordered_ && blocks.have_more_than(first_bytes_);
  const auto exchange_part = [&](std::int64_t begin, std::optional<std::int64_t> end) {
    blocks.transfer(begin, end, [&](const AllToAllV& part) { transfer(part, check); });
    for (int peer = 0; peer < ranks_; ++peer) {
      // A block of another exchange may be longer, and what follows is still to come.
      const bool is_whole = begin > 0 || (!in_parts && (!ordered_ || blocks.is_same_call(peer, mine)));
      const std::string fault = is_whole ? blocks.fault_of_block(peer) : blocks.fault_of_header(peer);
      if (!fault.empty()) fail_transfer(fault);
    }
    progress_.reach(call_, 2 * transfers_ + 1);
  };
  if (!ordered_) return exchange_part(0, std::nullopt);
  exchange_part(0, first_bytes_);
  blocks.require_same_order(mine);
  if (in_parts) exchange_part(first_bytes_, std::nullopt);
}

void EngineCall::exchange_messages(const Check& check) {
  const CallBlocks& blocks = memory_->blocks;
  const auto following = [&](int peer) { return blocks.following(peer); };
  const auto table = [&](int peer) { return blocks.table_from(peer); };
  begin_step();
  try {
    memory_->messages->exchange(call_, following, table,
                                [&](const AllToAllV& each) { transfer(each, check); });
  } catch (...) {
    fail_group(std::current_exception());
  }
}

void EngineCall::transfer(const AllToAllV& transfer, const Check& check) {
  progress_.reach(call_, 2 * ++transfers_);
  if (memory_->messages->in_second_hop() && !in_second_hop_) begin_step();
  try {
    if (waits_.on()) {
      transfer_counted(transfer, check);
    } else {
      communicator_->all_to_all_v(transfer, memory_, check);
    }
  } catch (...) {
    fail_group(std::current_exception());
  }
}

// Counts the time of the transfer in which a thread waits for it, for whom every check finds missing.
void EngineCall::transfer_counted(const AllToAllV& transfer, const Check& check) {
  const auto look = [&] {
    const WaitRecord waited = missing();
    const int peer = waited.peer >= 0 ? waited.peer : waited.via;
    return peer >= 0 ? peer : me_;  // this rank: nobody can tell
  };
  int awaited = look();
  Clock::time_point counted_until = Clock::now();
  const auto count = [&] {
    const Clock::time_point now = Clock::now(), begin = std::max(counted_until, waiting_since_.load());
    if (begin < now) waits_.add(operation_, awaited, now - begin);
    counted_until = now;
  };
  communicator_->all_to_all_v(transfer, memory_, [&] {
    count();
    check();
    awaited = look();
  });
  count();
}

// What ends the waits of an EngineCall early: the loss of a peer, a deadline, a transfer that has failed.

namespace {

// How often a wait looks at all ranks of the host, which takes time for each of them. A failure of the group
// is noticed at every check.
constexpr std::chrono::milliseconds kPeerPeriod(50);
// How long a rank that has destroyed its exchange has to say why: it leaves the group next, or fails it with
// the exception that it ends by.
constexpr std::chrono::milliseconds kEndGrace(300);
// How long after its own deadline a rank waits for a peer that is further behind to give up first: at most,
// in seconds, and as a part of the deadline.
constexpr double kMostGraceSeconds = 0.1, kGracePart = 0.1;

}  // namespace

WaitRecord EngineCall::record() const {
  return {operation_, call_, me_, -1, call_, call_ - 1};
}

// Throws if the group has failed by a rank whose part of the current transfer is missing.
void EngineCall::check_group() {
  bool failed = rank_.state().control().failed();
  if (const Clock::time_point now = Clock::now(); !failed && now - peers_checked_ >= kPeerPeriod) {
    peers_checked_ = now;
    failed = rank_.state().check_peers(record()) || find_departed_rank();
  }
  if (failed && !has_lost_finished_rank()) throw_failure();
}

// Fails the group if a rank of this host will never make this call. A rank that has made it completes it
// before it leaves. Returns whether the group has failed.
bool EngineCall::find_departed_rank() {
  int ended = -1;
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == me_) continue;
    // Order matters: what a rank has reached is final once it has left.
    const bool left = rank_.state().control().status_of(peer) == RankStatus::left;
    if (left && !progress_.has_reached(peer, call_, posted_step_).value_or(true)) {
      fail_by_departure(peer, "has left the group");
      return true;
    }
    if (progress_.has_ended_before(peer, call_, posted_step_)) ended = peer;
  }
  if (ended < 0) return false;
  const Clock::time_point now = Clock::now();
  if (!end_seen_) end_seen_ = now;
  if (now - *end_seen_ < kEndGrace) return false;
  fail_by_departure(ended, "has destroyed its exchange");
  return true;
}

void EngineCall::fail_by_departure(int peer, const char* how) {
  WaitRecord waited = record();
  waited.peer = peer;
  const std::string text = str("rank ", peer, " ", how, ": ", describe(waited));
  rank_.state().control().fail(me_, failure_record(ErrorRecord::Kind::peer_lost, waited, text));
}

// The failure of the group. If this rank waits for what the failed rank sends it by way of a relay, the error
// names the relay too.
void EngineCall::throw_failure() const {
  WaitRecord waited = record();
  const int lost = rank_.state().control().failure().wait.peer;
  if (lost >= 0 && memory_->messages->in_second_hop()) waited.via = memory_->messages->relay_from(lost);
  waited.role = role(lost);
  rank_.state().control().throw_failure(waited, &rank_.topology());
}

WaitRole EngineCall::role(int peer) const {
  return exchanging_blocks_ ? WaitRole::none : memory_->messages->role(peer);
}

// True if the loss that failed the group does not concern this call, in two cases:
// - The lost rank had finished the current exchange of blocks. Each rank sends a block to every other rank.
//   So all ranks have begun that exchange and can finish it. A rank that refused the call may leave at once.
// - The lost rank had done its part of this call and then left. A later call misses it, not this one.
// A rank that was killed does not count: its messages may be lost with it.
bool EngineCall::has_lost_finished_rank() const {
  const ControlBlock& control = rank_.state().control();
  const int lost = control.failure().wait.peer;
  if (lost < 0) return false;
  const bool has_blocks = progress_.has_reached(lost, call_, 2 * transfers_ + 1).value_or(false);
  if (exchanging_blocks_ && has_blocks) return true;
  return control.status_of(lost) == RankStatus::left &&
         progress_.has_reached(lost, call_, CallProgress::kDone).value_or(false);
}

// In the thread that runs the exchange.
void EngineCall::check_in_thread() {
  check_group();
  if (overdue_) give_up();
}

// In the thread that runs the exchange, once the deadline has passed. A rank of this host that is behind, but
// in a call, itself waits for some rank and knows which. Its deadline passes about now too, so it gets the
// time to name that rank.
void EngineCall::give_up() {
  const WaitRecord waited = missing();
  const int peer = waited.peer;
  if (peer >= 0 && progress_.is_in_call(peer) &&
      !progress_.has_reached(peer, call_, 2 * transfers_).value_or(true)) {
    const Clock::time_point now = Clock::now();
    if (!overdue_since_) overdue_since_ = now;
    const std::chrono::duration<double> grace(std::min(kMostGraceSeconds, kGracePart * deadline_));
    if (now - *overdue_since_ < grace) return;
  }
  time_out(waited);
}

// Whom this rank waits for in the current transfer, as far as is known: of the ranks of this host that have
// not begun the transfer the last one, or the only rank from which something is missing. In the second hop a
// relay is named as such: it waits for the ranks behind it, or is itself what is missing.
WaitRecord EngineCall::missing() const {
  const MessageHops& messages = *memory_->messages;
  const bool second_hop = messages.in_second_hop();
  const auto waiting_for = [&](int peer) {
    WaitRecord waited = record();
    (second_hop && messages.is_relay(peer) ? waited.via : waited.peer) = peer;
    return waited;
  };
  int last = -1;
  std::vector<int> missing, missing_relays, missing_here;  // `missing_here`: of this host
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == me_) continue;
    const std::optional<bool> reached = progress_.has_reached(peer, call_, 2 * transfers_);
    if (!reached.value_or(true)) {
      if (last < 0 || progress_.place(peer) < progress_.place(last)) last = peer;
      continue;
    }
    const bool arrived = exchanging_blocks_ ? memory_->blocks.arrived(peer) : messages.has_arrived(peer);
    if (arrived) continue;
    (reached.has_value() ? missing_here : missing).push_back(peer);
    if (!reached.has_value() && second_hop && messages.is_relay(peer)) missing_relays.push_back(peer);
  }
  if (last >= 0) return waiting_for(last);
  // An engine may move no bytes until all ranks have come. Those of this host have, so others come first.
  // A late rank also delays its relay. This rank waits for the relay, so it names that one.
  const std::vector<int>& known = !missing_relays.empty() ? missing_relays
                                  : !missing.empty()      ? missing
                                                          : missing_here;
  return known.size() == 1 ? waiting_for(known.front()) : record();
}

// In the thread that runs the exchange, during a transfer.
void EngineCall::time_out(WaitRecord waited) const {
  waited.role = role(waited.peer);
  const int named = waited.peer >= 0 ? waited.peer : waited.via;
  if (named >= 0 && rank_.topology().nodes() > 1) waited.node = rank_.topology().node_of(named);
  rank_.state().time_out(waited, deadline_);
  throw_failure();
}

void EngineCall::fail_transfer(const std::string& fault) const {
  fail_group(std::make_exception_ptr(UsageError(fault)));
}

// A failed transfer is final for the group. If the group has failed, its failure is what ended the transfer.
void EngineCall::fail_group(const std::exception_ptr& error) const {
  ControlBlock& control = rank_.state().control();
  if (!control.failed()) {
    WaitRecord failed = record();
    failed.peer = me_;
    const std::string text = str("the engine of rank ", me_, " failed in ", to_string(operation_), " ", call_,
                                 ": ", ErrorRecord::of(error).text);
    control.fail(me_, failure_record(ErrorRecord::Kind::peer_lost, failed, text));
  }
  throw_failure();
}

}  // namespace ferry::collective
