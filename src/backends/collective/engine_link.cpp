#include "backends/collective/engine_link.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/callback_scope.hpp"
#include "base/text.hpp"
#include "group/rank_state.hpp"

namespace ferry::collective {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kCheckPeriod(10);
constexpr std::chrono::milliseconds kInterruptPeriod(250);

}  // namespace

std::int64_t EngineLink::content_bytes(std::int64_t summary_bytes, int ranks, bool relays) {
  return (summary_bytes + 7) / 8 * 8 + MessageHops::table_bytes(ranks, relays);
}

EngineLink::EngineLink(Rank rank, std::unique_ptr<Communicator> communicator, int lane,
                       std::int64_t summary_bytes, const HopOptions& hops, const MessageMemory& memory,
                       double deadline, std::shared_ptr<TransferThread> ordered)
    : rank_(std::move(rank)),
      me_(rank_.index()),
      ranks_(rank_.size()),
      lane_(lane),
      has_relays_(hops.relays),
      summary_bytes_(summary_bytes),
      deadline_(deadline),
      communicator_(std::move(communicator)),
      memory_(std::make_shared<Memory>(
          Memory{.blocks = {ranks_, content_bytes(summary_bytes, ranks_, hops.relays)},
                 .messages = MessageHops(rank_.topology(), me_, hops, memory)})),
      ordered_(ordered != nullptr),
      thread_(std::move(ordered)) {}

EngineLink::~EngineLink() {
  try {
    finish_started();
  } catch (...) {
    return;  // the group has failed, which every later call of the group reports
  }
}

std::uint64_t EngineLink::begin(Operation operation, std::span<const CallOption> options) {
  CallbackScope::require_none("an operation of an exchange");
  finish_started();
  ++call_;
  operation_ = operation;
  options_.assign(options.begin(), options.end());
  refusal_.reset();
  memory_->messages.clear();
  begun_ = true;
  return call_;
}

// Waits for the exchange of the call before, if one still runs. What ended that call was thrown by wait(), or
// concerns only the peers; but if the group has failed, no call starts.
void EngineLink::finish_started() {
  if (started_.valid()) {
    wait_for_started();
    started_ = {};
  }
  const ControlBlock& control = rank_.state().control();
  if (control.failed()) control.throw_failure({operation_, call_ + 1, me_, -1, call_ + 1, call_});
}

const std::byte* EngineLink::summary_from(int peer) const {
  return peer == me_ ? memory_->blocks.content_to(me_) : memory_->blocks.content_from(peer);
}

void EngineLink::post(bool split) {
  begun_ = false;
  write_headers();
  if (split || ordered_) start_in_thread();
}

void EngineLink::wait() {
  if (started_.valid()) {
    wait_for_started();
    if (const std::exception_ptr error = started_.get()) std::rethrow_exception(error);
    return;
  }
  const WaitLimit limit{.seconds = deadline_};
  Clock::time_point last_interrupt_check = Clock::now();
  exchange([&] {
    check_group();
    if (limit.seconds_left() <= 0) {
      rank_.state().time_out(record(), deadline_);
      check_group();
    }
    if (Clock::now() - last_interrupt_check < kInterruptPeriod) return;
    last_interrupt_check = Clock::now();
    if (rank_.state().check_interrupt(record())) check_group();
  });
}

void EngineLink::refuse(Operation operation, const Error& error) noexcept {
  try {
    if (!begun_) begin(operation, {});
    refusal_ = ErrorRecord::of(error);
    memory_->messages.clear();
    begun_ = false;
    write_headers();
    start_in_thread();
  } catch (...) {
    return;  // the group has failed: no peer waits for this call, and the next begin() throws the failure
  }
}

void EngineLink::start_in_thread() {
  if (!thread_) thread_ = std::make_shared<TransferThread>();
  started_ = thread_->submit([this] { exchange([this] { check_group(); }); });
}

// The exchange itself has no deadline: a peer may start its send phase as late as it likes while nobody
// waits. A wait that ends fails the group, which ends the exchange.
void EngineLink::wait_for_started() {
  const WaitLimit limit{.seconds = deadline_};
  Clock::time_point last_interrupt_check = Clock::now();
  while (started_.wait_for(kCheckPeriod) != std::future_status::ready) {
    if (rank_.state().control().failed()) continue;
    if (limit.seconds_left() <= 0) rank_.state().time_out(record(), deadline_);
    if (Clock::now() - last_interrupt_check < kInterruptPeriod) continue;
    last_interrupt_check = Clock::now();
    rank_.state().check_interrupt(record());
  }
}

void EngineLink::exchange(const Check& check) {
  exchange_blocks(check);
  if (refusal_) return;
  require_agreement();
  if (memory_->messages.has_messages()) exchange_messages(check);
}

// The table of MessageHops in a block; null without relays.
std::int64_t* EngineLink::table_in(const std::byte* block_content) const {
  const std::byte* table = block_content + (summary_bytes_ + 7) / 8 * 8;
  return has_relays_ ? reinterpret_cast<std::int64_t*>(const_cast<std::byte*>(table)) : nullptr;
}

void EngineLink::write_headers() {
  for (int peer = 0; peer < ranks_; ++peer) {
    BlockHeader& header = memory_->blocks.header_to(peer);
    header.lane = lane_;
    header.operation = operation_;
    header.call = call_;
    header.messages = memory_->messages.announce(peer, table_in(memory_->blocks.content_to(peer)));
    header.refused = refusal_.has_value();
    header.option_count = static_cast<std::int32_t>(options_.size());
    for (std::size_t i = 0; i < options_.size(); ++i) header.options[i] = options_[i].value;
    if (refusal_) header.refusal = *refusal_;
  }
}

void EngineLink::exchange_blocks(const Check& check) {
  const PairBlocks<BlockHeader>& blocks = memory_->blocks;
  for (int peer = 0; peer < ranks_; ++peer) blocks.forget(peer);
  std::vector<std::int64_t> bytes, offsets;
  for (int peer = 0; peer < ranks_; ++peer) {
    bytes.push_back(peer == me_ ? 0 : blocks.block_bytes());
    offsets.push_back(blocks.offset(peer));
  }
  transfer({.send = blocks.sent(),
            .send_bytes = bytes,
            .send_offsets = offsets,
            .receive = blocks.received(),
            .receive_bytes = bytes,
            .receive_offsets = offsets},
           check);
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != me_ && !blocks.arrived(peer)) fail_transfer(peer);
  }
}

// Throws if some rank has refused the call, or has made another one. Every rank has all blocks, and all ranks
// throw if two blocks differ.
void EngineLink::require_agreement() const {
  for (int peer = 0; peer < ranks_; ++peer) {
    const BlockHeader& header = memory_->blocks.header_from(peer);
    if (peer == me_ || (header.lane == lane_ && header.call == call_)) continue;
    throw UsageError(str("call ", call_, " of lane ", lane_, " on rank ", me_, " meets call ", header.call,
                         " of lane ", header.lane, " on rank ", peer,
                         ": this engine needs the calls of all lanes in the same order on all ranks"));
  }
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

void EngineLink::exchange_messages(const Check& check) {
  const PairBlocks<BlockHeader>& blocks = memory_->blocks;
  const MessageHops::Wire wire = {.transfer = [&](const AllToAllV& each) { transfer(each, check); },
                                  .fail = [&](int peer) { fail_transfer(peer); }};
  const auto following = [&](int peer) {
    return peer == me_ ? blocks.header_to(me_).messages : blocks.header_from(peer).messages;
  };
  const auto table = [&](int peer) { return table_in(summary_from(peer)); };
  try {
    memory_->messages.exchange(call_, following, table, wire);
  } catch (...) {
    fail_group(std::current_exception());
  }
}

void EngineLink::fail_transfer(int peer) const {
  fail_group(std::make_exception_ptr(
      UsageError(str("all_to_all_v returned before the bytes of rank ", peer, " had arrived"))));
}

void EngineLink::transfer(const AllToAllV& transfer, const Check& check) {
  try {
    communicator_->all_to_all_v(transfer, memory_, check);
  } catch (...) {
    fail_group(std::current_exception());
  }
}

WaitRecord EngineLink::record() const {
  return {operation_, call_, me_, -1, call_, call_ - 1};
}

// Throws if the group has failed.
void EngineLink::check_group() const {
  if (rank_.state().check_peers(record())) rank_.state().control().throw_failure(record());
}

// A failed transfer is final for the group. If the group has failed, its failure is what ended the transfer.
void EngineLink::fail_group(const std::exception_ptr& error) const {
  ControlBlock& control = rank_.state().control();
  if (!control.failed()) {
    WaitRecord failed = record();
    failed.peer = me_;
    const std::string text = str("the engine of rank ", me_, " failed in ", to_string(operation_), " ", call_,
                                 ": ", ErrorRecord::of(error).text);
    control.fail(me_, failure_record(ErrorRecord::Kind::peer_lost, failed, text));
  }
  control.throw_failure(record());
}

}  // namespace ferry::collective
