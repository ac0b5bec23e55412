#include "backends/collective/engine_call.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/callback_scope.hpp"
#include "base/text.hpp"
#include "group/rank_state.hpp"

namespace ferry::collective {
namespace {

constexpr std::chrono::milliseconds kCheckPeriod(10);
constexpr std::chrono::milliseconds kInterruptPeriod(250);
// How often a wait looks at all processes of the host, which takes time for each rank. A failure of the group
// is noticed at every check.
constexpr std::chrono::milliseconds kPeerPeriod(50);

// How much longer than its deadline a rank waits for what a relay forwards, in seconds: at most, and as a
// part of the deadline. The relay's own wait for the rank before it began about then, and must end first.
constexpr double kMostExtraSeconds = 0.5, kExtraPart = 0.25;

constexpr std::int64_t align_summary(std::int64_t bytes) {
  return (bytes + 7) / 8 * 8;
}

static_assert(PairBlocks<BlockHeader>::kHeaderBytes <= Communicator::kFirstBytes);

// Bytes in the blocks to each rank and from each rank. [R]
struct ContentBytes {
  std::vector<std::int64_t> sent, received;

  ContentBytes(std::int64_t summary_bytes, int ranks, const TableBytes& tables, std::int64_t first_bytes) {
    // At least so many that all blocks have a first transfer.
    const std::int64_t least = first_bytes - PairBlocks<BlockHeader>::kHeaderBytes;
    const std::int64_t summary = align_summary(summary_bytes);
    for (int peer = 0; peer < ranks; ++peer) {
      sent.push_back(std::max(least, summary + tables.sent_to(peer)));
      received.push_back(std::max(least, summary + tables.received_from(peer)));
    }
  }
};

PairBlocks<BlockHeader> make_blocks(const ContentBytes& contents) {
  return {contents.sent, contents.received};
}

}  // namespace

std::int64_t EngineCall::blocks_bytes(std::int64_t summary_bytes, int ranks, const TableBytes& tables) {
  const ContentBytes contents(summary_bytes, ranks, tables, Communicator::kFirstBytes);
  return PairBlocks<BlockHeader>::bytes(contents.sent, contents.received);
}

EngineCall::EngineCall(Rank rank, std::unique_ptr<Communicator> communicator, int lane,
                       std::int64_t summary_bytes, std::unique_ptr<MessageCarrier> messages, double deadline,
                       std::shared_ptr<TransferThread> ordered)
    : rank_(std::move(rank)),
      me_(rank_.index()),
      ranks_(rank_.size()),
      lane_(lane),
      lane_number_(rank_.state().number_lane()),
      progress_(rank_.state().control(), me_, lane_number_),
      summary_bytes_(align_summary(summary_bytes)),
      first_bytes_(communicator->first_bytes()),
      has_tables_(!messages->tables().sent.empty()),
      deadline_(deadline),
      communicator_(std::move(communicator)),
      memory_(std::make_shared<Memory>(
          Memory{.blocks = make_blocks({summary_bytes, ranks_, messages->tables(), first_bytes_}),
                 .messages = std::move(messages)})),
      ordered_(ordered != nullptr),
      thread_(std::move(ordered)) {}

EngineCall::~EngineCall() {
  try {
    finish_started(operation_);
  } catch (...) {
    return;  // the group has failed, which every later call of the group reports
  }
}

std::uint64_t EngineCall::begin(Operation operation, std::span<const CallOption> options) {
  CallbackScope::require_none("an operation of an exchange");
  finish_started(operation);
  ++call_;
  operation_ = operation;
  options_.assign(options.begin(), options.end());
  refusal_.reset();
  memory_->messages->clear();
  prepare_ = {};
  transfers_ = 0;
  exchanging_ = overdue_ = exchanging_blocks_ = in_second_hop_ = false;
  step_begin_ = Clock::time_point();
  begun_ = true;
  return call_;
}

// Waits for the exchange of the call before, if one still runs. What ended that call was thrown by wait(), or
// concerns only the peers; but if the group has failed, no call starts. `next`: the operation of the call
// that would.
void EngineCall::finish_started(Operation next) {
  if (started_.valid()) {
    wait_for_started();
    started_ = {};
  }
  const ControlBlock& control = rank_.state().control();
  if (control.failed()) control.throw_failure({next, call_ + 1, me_, -1, call_ + 1, call_});
}

const std::byte* EngineCall::summary_from(int peer) const {
  return peer == me_ ? memory_->blocks.content_to(me_) : memory_->blocks.content_from(peer);
}

void EngineCall::post(bool split, std::function<void(const Check&)> prepare) {
  begun_ = false;
  prepare_ = std::move(prepare);
  progress_.reach(call_, 0);
  if (split || (ordered_ && !communicator_->gives_up_at_once())) start_in_thread();
}

void EngineCall::wait() {
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
  exchange([&] {
    check_group();
    if (is_overdue(begin)) time_out();
    if (Clock::now() - last_interrupt_check < kInterruptPeriod) return;
    last_interrupt_check = Clock::now();
    if (rank_.state().check_interrupt(record())) rank_.state().control().throw_failure(record());
  });
}

void EngineCall::refuse(Operation operation, const Error& error) noexcept {
  try {
    if (!begun_) begin(operation, {});
    refusal_ = ErrorRecord::of(error);
    memory_->messages->clear();
    prepare_ = {};
    begun_ = false;
    progress_.reach(call_, 0);
    start_in_thread();
  } catch (...) {
    return;  // the group has failed: no peer waits for this call, and the next begin() throws the failure
  }
}

void EngineCall::start_in_thread() {
  if (!thread_) thread_ = std::make_shared<TransferThread>();
  started_ = thread_->submit([this] { exchange([this] { check_in_thread(); }); });
}

// The exchange itself has no deadline: a peer may start its send phase as late as it likes while nobody
// waits. A wait that ends fails the group, which ends the exchange.
void EngineCall::wait_for_started() {
  const Clock::time_point begin = Clock::now();
  Clock::time_point last_interrupt_check = begin;
  while (started_.wait_for(kCheckPeriod) != std::future_status::ready) {
    const bool failed = rank_.state().control().failed();
    if (is_overdue(begin)) {
      // The thread knows which rank is missing, unless another lane's exchange keeps it.
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
  if (prepare_) prepare_(check);
  write_headers();
  exchanging_blocks_ = true;
  exchange_blocks(check);
  exchanging_blocks_ = false;
  if (refusal_) return;
  require_agreement();
  if (memory_->messages->has_messages()) exchange_messages(check);
}

// The carrier's table in a block; null if it has none.
std::int64_t* EngineCall::table_in(const std::byte* block_content) const {
  if (!has_tables_) return nullptr;
  return reinterpret_cast<std::int64_t*>(const_cast<std::byte*>(block_content) + summary_bytes_);
}

void EngineCall::write_headers() {
  for (int peer = 0; peer < ranks_; ++peer) {
    BlockHeader& header = memory_->blocks.header_to(peer);
    header.lane = lane_;
    header.lane_number = lane_number_;
    header.operation = operation_;
    header.call = call_;
    header.messages = memory_->messages->announce(peer, table_in(memory_->blocks.content_to(peer)));
    header.refused = refusal_.has_value();
    header.option_count = static_cast<std::int32_t>(options_.size());
    for (std::size_t i = 0; i < options_.size(); ++i) header.options[i] = options_[i].value;
    if (refusal_) header.refusal = *refusal_;
  }
}

void EngineCall::exchange_blocks(const Check& check) {
  const PairBlocks<BlockHeader>& blocks = memory_->blocks;
  for (int peer = 0; peer < ranks_; ++peer) blocks.forget(peer);
  if (ordered_) {
    transfer_blocks(0, first_bytes_, check);
  } else {
    transfer_blocks(0, std::nullopt, check);
  }
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != me_ && !blocks.arrived(peer)) fail_transfer(peer);
  }
  require_same_order();
  // All ranks decide alike: without tables all blocks have one size.
  if (ordered_ && (has_tables_ || blocks.sent_bytes(0) > first_bytes_))
    transfer_blocks(first_bytes_, std::nullopt, check);
}

// Exchanges the bytes of all blocks from `begin` on, up to `end`. Empty: up to their end.
void EngineCall::transfer_blocks(std::int64_t begin, std::optional<std::int64_t> end, const Check& check) {
  const PairBlocks<BlockHeader>& blocks = memory_->blocks;
  std::vector<std::int64_t> sent_bytes, sent_offsets, received_bytes, received_offsets;
  for (int peer = 0; peer < ranks_; ++peer) {
    sent_bytes.push_back(peer == me_ ? 0 : end.value_or(blocks.sent_bytes(peer)) - begin);
    received_bytes.push_back(peer == me_ ? 0 : end.value_or(blocks.received_bytes(peer)) - begin);
    sent_offsets.push_back(blocks.sent_offset(peer) + begin);
    received_offsets.push_back(blocks.received_offset(peer) + begin);
  }
  transfer({.send = blocks.sent(),
            .send_bytes = sent_bytes,
            .send_offsets = sent_offsets,
            .receive = blocks.received(),
            .receive_bytes = received_bytes,
            .receive_offsets = received_offsets},
           check);
}

// Every rank has the headers of all, so all ranks throw if two have made different calls.
void EngineCall::require_same_order() const {
  for (int peer = 0; peer < ranks_; ++peer) {
    const BlockHeader& header = memory_->blocks.header_from(peer);
    if (peer == me_ || (header.lane_number == lane_number_ && header.call == call_)) continue;
    const bool other_exchange = header.lane_number - header.lane != lane_number_ - lane_;
    throw UsageError(str("call ", call_, " of lane ", lane_, " on rank ", me_, " meets call ", header.call,
                         " of lane ", header.lane, other_exchange ? " of another exchange" : "", " on rank ",
                         peer,
                         ": this engine needs the calls of all lanes and exchanges in the same order on all "
                         "ranks"));
  }
}

// Throws if some rank has refused the call, or has made another one. Every rank has all blocks, and all ranks
// throw if two blocks differ.
void EngineCall::require_agreement() const {
  for (int peer = 0; peer < ranks_; ++peer) {
    const BlockHeader& header = memory_->blocks.header_from(peer);
    if (peer != me_ && header.refused != 0)
      throw_refusal(peer, header.operation, header.call, header.refusal);
  }
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == me_) continue;
    const BlockHeader& header = memory_->blocks.header_from(peer);
    require_same_call({me_, call_, operation_, options_}, peer, header.operation,
                      {header.options.data(), static_cast<std::size_t>(header.option_count)});
  }
}

void EngineCall::exchange_messages(const Check& check) {
  const PairBlocks<BlockHeader>& blocks = memory_->blocks;
  const MessageCarrier::Wire wire = {.transfer = [&](const AllToAllV& each) { transfer(each, check); },
                                     .fail = [&](int peer) { fail_transfer(peer); }};
  const auto following = [&](int peer) {
    return peer == me_ ? blocks.header_to(me_).messages : blocks.header_from(peer).messages;
  };
  const auto table = [&](int peer) { return table_in(summary_from(peer)); };
  begin_step();
  try {
    memory_->messages->exchange(call_, following, table, wire);
  } catch (...) {
    fail_group(std::current_exception());
  }
}

void EngineCall::fail_transfer(int peer) const {
  fail_group(std::make_exception_ptr(
      UsageError(str("all_to_all_v returned before the bytes of rank ", peer, " had arrived"))));
}

void EngineCall::transfer(const AllToAllV& transfer, const Check& check) {
  progress_.reach(call_, 2 * ++transfers_);
  if (memory_->messages->in_second_hop() && !in_second_hop_) begin_step();
  try {
    communicator_->all_to_all_v(transfer, memory_, check);
  } catch (...) {
    fail_group(std::current_exception());
  }
  progress_.reach(call_, 2 * transfers_ + 1);
}

WaitRecord EngineCall::record() const {
  return {operation_, call_, me_, -1, call_, call_ - 1};
}

// Throws if the group has failed by a rank whose part of the current transfer is missing.
void EngineCall::check_group() {
  bool failed = rank_.state().control().failed();
  if (const Clock::time_point now = Clock::now(); !failed && now - peers_checked_ >= kPeerPeriod) {
    peers_checked_ = now;
    failed = rank_.state().check_peers(record());
  }
  if (failed && !has_lost_finished_rank()) throw_failure();
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

// Whether the rank whose loss has failed the group had finished the current exchange of blocks. Since every
// rank sends a block to every other one, all of them have then begun that exchange. They all find this out
// and finish it, so a rank that has refused the call may depart at once.
bool EngineCall::has_lost_finished_rank() const {
  if (!exchanging_blocks_) return false;
  const int lost = rank_.state().control().failure().wait.peer;
  return lost >= 0 && progress_.has_reached(lost, call_, 2 * transfers_ + 1).value_or(false);
}

// In the thread that runs the exchange.
void EngineCall::check_in_thread() {
  check_group();
  if (overdue_) time_out();
}

// Whom this rank waits for in the current transfer, as far as is known: a rank of this host that has not
// begun the transfer, or the only one from which something is missing. In the second hop a relay is named as
// such: it waits for the ranks behind it, or is itself what is missing.
WaitRecord EngineCall::missing() const {
  const MessageCarrier& messages = *memory_->messages;
  const bool second_hop = messages.in_second_hop();
  const auto waiting_for = [&](int peer) {
    WaitRecord waited = record();
    (second_hop && messages.is_relay(peer) ? waited.via : waited.peer) = peer;
    return waited;
  };
  std::vector<int> missing, missing_relays;
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == me_) continue;
    const std::optional<bool> reached = progress_.has_reached(peer, call_, 2 * transfers_);
    if (reached.has_value() && !*reached) return waiting_for(peer);
    const bool arrived = exchanging_blocks_ ? memory_->blocks.arrived(peer) : messages.has_arrived(peer);
    if (reached.has_value() || arrived) continue;
    missing.push_back(peer);
    if (second_hop && messages.is_relay(peer)) missing_relays.push_back(peer);
  }
  // A late rank also delays its relay. This rank waits for the relay, so it names that one.
  const std::vector<int>& known = missing_relays.empty() ? missing : missing_relays;
  return known.size() == 1 ? waiting_for(known.front()) : record();
}

// In the thread that runs the exchange, during a transfer.
void EngineCall::time_out() const {
  WaitRecord waited = missing();
  waited.role = role(waited.peer);
  const int named = waited.peer >= 0 ? waited.peer : waited.via;
  if (named >= 0 && rank_.topology().nodes() > 1) waited.node = rank_.topology().node_of(named);
  rank_.state().time_out(waited, deadline_);
  throw_failure();
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
