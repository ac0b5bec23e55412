// What ends the waits of an EngineCall early: the loss of a peer, a deadline, a transfer that has failed.
#include <algorithm>
#include <chrono>
#include <utility>

#include "backends/collective/engine_call.hpp"
#include "base/text.hpp"
#include "group/rank_state.hpp"

namespace ferry::collective {
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
    if (left && !progress_.has_reached(peer, call_, 0).value_or(true)) {
      fail_by_departure(peer, "has left the group");
      return true;
    }
    if (progress_.has_ended_before(peer, call_)) ended = peer;
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
