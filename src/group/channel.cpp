#include "group/channel.hpp"

#include <algorithm>
#include <stdexcept>

#include "base/text.hpp"
#include "group/rank_state.hpp"
#include "memory/symmetric_memory.hpp"

namespace ferry {

namespace {

constexpr std::int64_t kLine = 64;

constexpr std::int64_t round_up(std::int64_t bytes) {
  return (bytes + kLine - 1) / kLine * kLine;
}

}  // namespace

// Stored last with release, so whoever has read `call` with acquire may read the rest, the note and the
// staging. The first six options share its cache line. Zero bytes are a letter never sent.
struct alignas(kLine) Channel::Letter {
  std::atomic<std::uint64_t> call;
  Operation operation;
  std::int16_t refused;
  std::int16_t option_count;
  std::array<std::int64_t, kMaxCallOptions> options;
  ErrorRecord refusal;
  alignas(kLine) std::atomic<std::uint64_t> chunk;  // the last one posted
};

struct alignas(kLine) Channel::Own {
  std::uint64_t call;  // the lane's last call on this rank
  std::array<std::atomic<std::uint64_t>, 2>
      refused_call;  // by generation: the last one that any peer refused
};

// On every rank: Own, then the letters [ranks][2], then the notes [ranks][2].
std::int64_t Channel::bytes(int ranks, std::int64_t note_bytes) {
  return static_cast<std::int64_t>(sizeof(Own)) +
         2 * ranks * (static_cast<std::int64_t>(sizeof(Letter)) + round_up(note_bytes));
}

Channel::Channel(Rank rank, const SymmetricMemory& memory, std::int64_t offset, std::int64_t note_bytes,
                 double deadline)
    : rank_(std::move(rank)),
      memory_(&memory),
      offset_(offset),
      note_bytes_(round_up(note_bytes)),
      deadline_(deadline),
      index_(rank_.index()),
      ranks_(rank_.size()),
      posted_(ranks_, 0) {}

Channel::Own& Channel::own(int at) const {
  return *reinterpret_cast<Own*>(memory_->at(at, offset_));
}

Channel::Letter& Channel::letter(int at, int from, std::uint64_t call) const {
  std::byte* letters = memory_->at(at, offset_ + static_cast<std::int64_t>(sizeof(Own)));
  return reinterpret_cast<Letter*>(letters)[2 * from + static_cast<int>(call & 1)];
}

std::byte* Channel::note(int at, int from) const {
  const auto letters = static_cast<std::int64_t>(2 * ranks_ * sizeof(Letter));
  const std::int64_t place = 2 * from + parity();
  return memory_->at(at, offset_ + static_cast<std::int64_t>(sizeof(Own)) + letters + place * note_bytes_);
}

std::byte* Channel::note_to(int peer) const {
  return note(peer, index_);
}

const std::byte* Channel::note_from(int peer) const {
  return note(index_, peer);
}

std::uint64_t Channel::begin(Operation operation, std::span<const CallOption> options) {
  const GroupControl& control = rank_.state().control();
  if (control.failed()) control.throw_failure({operation, call_ + 1, index_, -1, call_ + 1, call_});
  await_previous();
  take_number(operation, options);
  return call_;
}

void Channel::take_number(Operation operation, std::span<const CallOption> options) {
  if (options.size() > options_.size()) throw std::length_error("too many options of a call");
  call_ = ++own(index_).call;
  operation_ = operation;
  option_count_ = static_cast<int>(options.size());
  std::copy(options.begin(), options.end(), options_.begin());
}

// Nothing of the call before the previous one is overwritten before its reader has ended it: see the header.
void Channel::await_previous() {
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != index_ && call_ > 0) await(peer, nullptr);
  }
}

// Until the peer has posted or refused call_, or `instead` has reached it.
void Channel::await(int peer, const std::atomic<std::uint64_t>* instead) {
  const Signal signal{&letter(index_, peer, call_).call, instead};
  if (signal.reached(call_)) return;
  const std::uint64_t before = letter(index_, peer, call_ + 1).call.load(std::memory_order_relaxed);
  rank_.state().wait(signal, {operation_, call_, index_, peer, call_, before}, deadline_);
}

void Channel::post(int peer) {
  Letter& out = letter(peer, index_, call_);
  out.operation = operation_;
  out.refused = 0;
  out.option_count = static_cast<std::int16_t>(option_count_);
  for (int i = 0; i < option_count_; ++i) out.options[i] = options_[i].value;
  out.chunk.store(0, std::memory_order_relaxed);
  // Release: orders the letter, the note and the rows before the call number. Sequentially consistent for
  // WakeEvent.
  out.call.store(call_, std::memory_order_seq_cst);
  finish_post(peer);
}

void Channel::finish_post(int peer) {
  posted_[peer] = call_;
  rank_.state().control().bell(peer).ring();
}

void Channel::wait(int peer) {
  std::atomic<std::uint64_t>& refused_call = own(index_).refused_call[parity()];
  await(peer, &refused_call);
  const Letter& in = letter(index_, peer, call_);
  if (in.call.load(std::memory_order_acquire) != call_) raise_any_refusal();
  if (in.refused != 0) raise_refusal(peer, in);
  compare(peer, in);
}

void Channel::post_chunk(int peer, std::int64_t chunk) {
  // Release: orders the rows before the number. Sequentially consistent for WakeEvent.
  letter(peer, index_, call_).chunk.store(static_cast<std::uint64_t>(chunk), std::memory_order_seq_cst);
  rank_.state().control().bell(peer).ring();
}

void Channel::wait_chunk(int peer, std::int64_t chunk) {
  const Signal signal{&letter(index_, peer, call_).chunk};
  const auto expected = static_cast<std::uint64_t>(chunk);
  if (signal.reached(expected)) return;
  rank_.state().wait(signal, {operation_, call_, index_, peer, expected, 0}, deadline_);
}

// Another peer has refused the call while the one waited for is not here yet.
void Channel::raise_any_refusal() const {
  for (int peer = 0; peer < ranks_; ++peer) {
    const Letter& in = letter(index_, peer, call_);
    if (in.call.load(std::memory_order_acquire) == call_ && in.refused != 0) raise_refusal(peer, in);
  }
}

void Channel::raise_refusal(int peer, const Letter& in) const {
  in.refusal.raise(str("rank ", peer, " refused ", to_string(in.operation), " ", call_, ": "));
}

void Channel::compare(int peer, const Letter& in) const {
  if (in.operation != operation_) {
    throw UsageError(str("call ", call_, " of the lane is ", to_string(operation_), " on rank ", index_,
                         " and ", to_string(in.operation), " on rank ", peer));
  }
  const std::string call = str(to_string(operation_), " ", call_);
  for (int i = 0; i < std::min<int>(option_count_, in.option_count); ++i) {
    if (in.options[i] == options_[i].value) continue;
    throw UsageError(str(call, ": ", options_[i].name, " is ", options_[i].value, " on rank ", index_,
                         " and ", in.options[i], " on rank ", peer));
  }
  if (in.option_count != option_count_) {
    throw UsageError(str(call, " has ", option_count_, " options on rank ", index_, " and ", in.option_count,
                         " on rank ", peer));
  }
}

void Channel::refuse(Operation operation, const Error& error) noexcept {
  try {
    if (all_posted()) {
      await_previous();
      take_number(operation, {});
    }
  } catch (...) {
    return;  // the group has failed: there is nobody to tell, and the next begin() throws it
  }
  const ErrorRecord refusal = ErrorRecord::of(error);
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != index_ && posted_[peer] != call_) post_refusal(peer, refusal);
  }
}

bool Channel::all_posted() const {
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != index_ && posted_[peer] != call_) return false;
  }
  return true;
}

void Channel::post_refusal(int peer, const ErrorRecord& refusal) {
  Letter& out = letter(peer, index_, call_);
  out.operation = operation_;
  out.refused = 1;
  out.option_count = 0;
  out.refusal = refusal;
  // Release: orders the letter before its number, and both before the mark, which leads a waiter to the
  // letter.
  out.call.store(call_, std::memory_order_seq_cst);
  own(peer).refused_call[parity()].store(call_, std::memory_order_seq_cst);
  finish_post(peer);
}

}  // namespace ferry
