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

// Makes sure that the memory has at least `bytes`. It is mapped for what undamaged plans need.
void grow(LocalMemory& memory, std::int64_t bytes) {
  if (memory.bytes() < bytes) memory = LocalMemory(bytes);
}

// Stands in place of a message's last bytes until they arrive. That a message really ends with these bits is
// as unlikely as any value of 64 random bits.
std::uint64_t absence_mark(std::uint64_t call, int lane, int peer) {
  const std::uint64_t number = call << 24 ^ static_cast<std::uint64_t>(lane) << 16 ^
                               static_cast<std::uint64_t>(peer) ^ 0x6A09E667F3BCC908u;
  return (number ^ number >> 29) * 0x9E3779B97F4A7C15u;
}

}  // namespace

std::int64_t EngineLink::Messages::place() {
  std::int64_t end = 0;
  for (std::size_t peer = 0; peer < bytes.size(); ++peer) {
    offsets[peer] = end;
    end += (bytes[peer] + kPairAlign - 1) / kPairAlign * kPairAlign;
  }
  return end;
}

EngineLink::EngineLink(Rank rank, std::unique_ptr<Communicator> communicator, int lane,
                       std::int64_t summary_bytes, MessageMemory memory, double deadline,
                       std::shared_ptr<TransferThread> ordered)
    : rank_(std::move(rank)),
      me_(rank_.index()),
      ranks_(rank_.size()),
      lane_(lane),
      deadline_(deadline),
      communicator_(std::move(communicator)),
      memory_(std::make_shared<Memory>(Memory{.blocks = PairBlocks(ranks_, summary_bytes),
                                              .outbox = LocalMemory(memory.outbox),
                                              .inbox = LocalMemory(memory.inbox)})),
      ordered_(ordered != nullptr),
      thread_(std::move(ordered)) {
  for (Messages* messages : {&sent_, &received_}) {
    messages->bytes.assign(static_cast<std::size_t>(ranks_), 0);
    messages->offsets.assign(static_cast<std::size_t>(ranks_), 0);
  }
}

EngineLink::~EngineLink() {
  try {
    finish_started();
  } catch (...) {  // the group has failed, which every later call reports
  }
}

std::uint64_t EngineLink::begin(Operation operation, std::span<const CallOption> options) {
  CallbackScope::require_none("an operation of an exchange");
  finish_started();
  ++call_;
  operation_ = operation;
  options_.assign(options.begin(), options.end());
  refusal_.reset();
  has_messages_ = false;
  std::fill(sent_.bytes.begin(), sent_.bytes.end(), 0);
  begun_ = true;
  return call_;
}

// Waits for the exchange of the call before, if one still runs. What ended that call was thrown by wait(), or
// concerns only the peers; but if the group has failed, no call starts.
void EngineLink::finish_started() {
  if (started_.valid()) {
    wait_for_started();
    try {
      started_.get();
    } catch (const Error&) {
    }
  }
  const ControlBlock& control = rank_.state().control();
  if (control.failed()) control.throw_failure({operation_, call_ + 1, me_, -1, call_ + 1, call_});
}

void EngineLink::reserve(std::span<const std::int64_t> bytes) {
  has_messages_ = true;
  std::copy(bytes.begin(), bytes.end(), sent_.bytes.begin());
  grow(memory_->outbox, sent_.place());
}

std::byte* EngineLink::outgoing(cpu::Staging, int peer) {
  return memory_->outbox.data() + sent_.offsets[static_cast<std::size_t>(peer)];
}

const std::byte* EngineLink::incoming(cpu::Staging, int peer) const {
  const auto p = static_cast<std::size_t>(peer);
  return peer == me_ ? memory_->outbox.data() + sent_.offsets[p]
                     : memory_->inbox.data() + received_.offsets[p];
}

std::int64_t EngineLink::incoming_bytes(int peer) const {
  const auto p = static_cast<std::size_t>(peer);
  return peer == me_ ? sent_.bytes[p] : received_.bytes[p];
}

const std::byte* EngineLink::summary_from(int peer) const {
  return peer == me_ ? memory_->blocks.summary_to(me_) : memory_->blocks.summary_from(peer);
}

void EngineLink::post(bool split) {
  begun_ = false;
  write_headers();
  if (split || ordered_) start_in_thread();
}

void EngineLink::wait() {
  if (started_.valid()) {
    wait_for_started();
    started_.get();
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
    has_messages_ = false;
    begun_ = false;
    write_headers();
    start_in_thread();
  } catch (
      ...) {  // the group has failed: no peer waits for this call, and the next begin() throws the failure
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
  if (has_messages_) exchange_messages(check);
}

void EngineLink::write_headers() {
  for (int peer = 0; peer < ranks_; ++peer) {
    BlockHeader& header = memory_->blocks.header_to(peer);
    header.lane = lane_;
    header.operation = operation_;
    header.call = call_;
    header.message_bytes = has_messages_ ? sent_.bytes[static_cast<std::size_t>(peer)] : 0;
    header.refused = refusal_.has_value();
    header.option_count = static_cast<std::int32_t>(options_.size());
    for (std::size_t i = 0; i < options_.size(); ++i) header.options[i] = options_[i].value;
    if (refusal_) header.refusal = *refusal_;
  }
}

void EngineLink::exchange_blocks(const Check& check) {
  const PairBlocks& blocks = memory_->blocks;
  for (int peer = 0; peer < ranks_; ++peer) blocks.forget(peer);
  Messages all;
  for (int peer = 0; peer < ranks_; ++peer) {
    all.bytes.push_back(peer == me_ ? 0 : blocks.block_bytes());
    all.offsets.push_back(blocks.offset(peer));
  }
  transfer({.send = blocks.sent(),
            .send_bytes = all.bytes,
            .send_offsets = all.offsets,
            .receive = blocks.received(),
            .receive_bytes = all.bytes,
            .receive_offsets = all.offsets},
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
  Messages without_own = sent_;
  without_own.bytes[static_cast<std::size_t>(me_)] = 0;
  for (int peer = 0; peer < ranks_; ++peer) {
    received_.bytes[static_cast<std::size_t>(peer)] =
        peer == me_ ? 0 : memory_->blocks.header_from(peer).message_bytes;
  }
  grow(memory_->inbox, received_.place());
  for (int peer = 0; peer < ranks_; ++peer) {
    const std::uint64_t mark = absence_mark(call_, lane_, peer);
    if (std::byte* last = last_word_from(peer)) std::memcpy(last, &mark, sizeof mark);
  }
  transfer({.send = memory_->outbox.data(),
            .send_bytes = without_own.bytes,
            .send_offsets = without_own.offsets,
            .receive = memory_->inbox.data(),
            .receive_bytes = received_.bytes,
            .receive_offsets = received_.offsets},
           check);
  for (int peer = 0; peer < ranks_; ++peer) {
    const std::uint64_t mark = absence_mark(call_, lane_, peer);
    const std::byte* last = last_word_from(peer);
    if (last != nullptr && std::memcmp(last, &mark, sizeof mark) == 0) fail_transfer(peer);
  }
}

// Where the last eight bytes that the peer sends arrive; null if it sends none. No message is shorter.
std::byte* EngineLink::last_word_from(int peer) const {
  const auto p = static_cast<std::size_t>(peer);
  const std::int64_t bytes = received_.bytes[p];
  if (bytes < static_cast<std::int64_t>(sizeof(std::uint64_t))) return nullptr;
  return memory_->inbox.data() + received_.offsets[p] + bytes - sizeof(std::uint64_t);
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
