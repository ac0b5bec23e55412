#include "group/channel.hpp"

#include <algorithm>
#include <stdexcept>

#include "base/text.hpp"
#include "group/rank_state.hpp"

namespace ferry {

namespace {

constexpr std::int64_t kLineBytes = 64;  // of a cache line

constexpr std::int64_t round_up(std::int64_t bytes) {
  return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

}  // namespace

// `call` is stored last, with release: a rank that has loaded it with acquire may read the rest of the
// header, the summary and the staging. The first six options share its cache line. A header of zero bytes has
// not been written yet.
struct alignas(kLineBytes) Channel::CallHeader {
  std::atomic<std::uint64_t> call;
  std::int8_t operation;
  std::int8_t refused;
  std::int16_t option_count;
  std::uint32_t epoch;
  std::array<std::int64_t, kMaxComparedOptions> options;
  ErrorRecord refusal;
  alignas(kLineBytes) std::atomic<std::uint64_t> chunk;  // number of the last chunk posted
  std::atomic<std::uint64_t> found_difference;  // the last call that its rank ended because options differ
};

struct alignas(kLineBytes) Channel::LaneRecord {
  std::uint64_t last_call;                                 // the last call number taken on this rank
  std::array<std::atomic<std::uint64_t>, 2> refused_call;  // [parity] the last call that any peer refused
};

// On every rank: a LaneRecord, then headers [ranks][parity], then summaries [ranks][parity].
std::int64_t Channel::bytes(int ranks, std::int64_t summary_bytes) {
  return static_cast<std::int64_t>(sizeof(LaneRecord)) +
         2 * ranks * (static_cast<std::int64_t>(sizeof(CallHeader)) + round_up(summary_bytes));
}

Channel::Channel(Rank rank, std::vector<std::byte*> sections, std::int64_t summary_bytes, double deadline,
                 bool counts_waits)
    : rank_(std::move(rank)),
      sections_(std::move(sections)),
      summary_bytes_(round_up(summary_bytes)),
      deadline_(deadline),
      index_(rank_.index()),
      ranks_(rank_.size()),
      posted_(ranks_, 0),
      waits_(counts_waits ? ranks_ : 0) {}

Channel::LaneRecord& Channel::lane_record(int at) const {
  return *reinterpret_cast<LaneRecord*>(sections_[at]);
}

Channel::CallHeader& Channel::header(int at, int from, std::uint64_t call) const {
  std::byte* headers = sections_[at] + sizeof(LaneRecord);
  return reinterpret_cast<CallHeader*>(headers)[2 * from + static_cast<int>(call & 1)];
}

std::byte* Channel::summary(int at, int from) const {
  const auto header_bytes = static_cast<std::int64_t>(2 * ranks_ * sizeof(CallHeader));
  const std::int64_t index = 2 * from + parity();
  return sections_[at] + sizeof(LaneRecord) + header_bytes + index * summary_bytes_;
}

std::byte* Channel::summary_to(int peer) const {
  return summary(peer, index_);
}

const std::byte* Channel::summary_from(int peer) const {
  return summary(index_, peer);
}

std::uint64_t Channel::begin(Operation operation, std::span<const ComparedOption> options) {
  const ControlBlock& control = rank_.state().control();
  if (control.failed()) {
    const int lost = control.failure().wait.peer;
    if (has_refused(lost, call_ + 1)) {
      assign_call_number(operation, options);
      throw_refusal_of(lost);
    }
    if (has_found_difference(lost, call_ + 1)) {
      assign_call_number(operation, options);
      try {
        require_same_call_as_all(lost);
      } catch (const UsageError& difference) {
        refuse(operation, difference);
        throw;
      }
    }
    control.throw_failure({operation, call_ + 1, index_, -1, call_ + 1, call_});
  }
  wait_for_previous_call();
  assign_call_number(operation, options);
  return call_;
}

void Channel::assign_call_number(Operation operation, std::span<const ComparedOption> options) {
  if (options.size() > options_.size()) throw std::length_error("too many options of a call");
  call_ = ++lane_record(index_).last_call;
  limit_.reset();
  operation_ = operation;
  option_count_ = static_cast<int>(options.size());
  std::copy(options.begin(), options.end(), options_.begin());
}

// Step 1 of the argument in the header file: the next call may overwrite the buffer of the call before the
// previous one only after every peer has posted the previous one.
void Channel::wait_for_previous_call() {
  limit_.reset();
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != index_ && call_ > 0) wait_for_header(peer, nullptr);
  }
}

// Blocks until the peer has posted or refused call_, or until `alternative` has reached call_.
void Channel::wait_for_header(int peer, const std::atomic<std::uint64_t>* alternative) {
  const WaitCondition condition{&header(index_, peer, call_).call, alternative};
  if (condition.reached(call_)) return;
  const std::uint64_t previous = header(index_, peer, call_ + 1).call.load(std::memory_order_relaxed);
  wait_within_limit(condition, {operation_, call_, index_, peer, call_, previous}, 0);
}

// A rank that has refused the next call has seen the headers of this one, so every peer is about to post to
// this rank what it waits for: the loss of the refuser does not end the wait.
void Channel::wait_within_limit(const WaitCondition& condition, const WaitRecord& record,
                                std::uint64_t chunk) {
  if (!limit_ || limited_chunk_ != chunk) limit_ = WaitLimit{.seconds = deadline_};
  limited_chunk_ = chunk;
  const CountedWait counted(waits_, operation_, record.peer);
  try {
    rank_.state().wait(condition, record, *limit_);
  } catch (const PeerLostError&) {
    const int lost = rank_.state().control().failure().wait.peer;
    if (has_refused(lost, call_ + 1)) return rank_.state().wait(condition, record, *limit_, lost);
    if (has_found_difference(lost, call_)) require_same_call_as_all(lost);
    throw;
  }
}

// Whether this rank has the peer's refusal of that call. `call`: call_ + 1.
bool Channel::has_refused(int peer, std::uint64_t call) const {
  if (peer < 0 || peer == index_) return false;
  const CallHeader& received = header(index_, peer, call);
  return received.call.load(std::memory_order_acquire) == call && received.refused != 0;
}

// True if the peer has ended that call because options differ, its own or those of a third rank.
bool Channel::has_found_difference(int peer, std::uint64_t call) const {
  return peer >= 0 && peer != index_ &&
         header(index_, peer, call).found_difference.load(std::memory_order_acquire) == call;
}

// Waits for the headers of all peers, which have posted them before they could find a difference or are about
// to. The loss of rank `excused` does not end the wait.
void Channel::require_same_call_as_all(int excused) {
  const WaitLimit limit{.seconds = deadline_};
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == index_) continue;
    const CallHeader& received = header(index_, peer, call_);
    rank_.state().wait({&received.call}, {operation_, call_, index_, peer, call_, 0}, limit, excused);
    if (received.refused != 0) throw_refusal_of(peer);
    require_same_call(peer, received);
  }
}

void Channel::post(int peer) {
  CallHeader& sent = header(peer, index_, call_);
  sent.operation = static_cast<std::int8_t>(operation_);
  sent.refused = 0;
  sent.epoch = rank_.state().control().epoch();
  sent.option_count = static_cast<std::int16_t>(option_count_);
  for (int i = 0; i < option_count_; ++i) sent.options[i] = options_[i].value;
  sent.chunk.store(0, std::memory_order_relaxed);
  // Release: orders the header, the summary and the rows before the call number. Sequentially consistent
  // because WakeEvent requires it.
  sent.call.store(call_, std::memory_order_seq_cst);
  wake_after_post(peer);
}

void Channel::wake_after_post(int peer) {
  posted_[peer] = call_;
  rank_.state().control().wake_event(peer).ring();
}

void Channel::wait(int peer) {
  std::atomic<std::uint64_t>& refused_call = lane_record(index_).refused_call[parity()];
  wait_for_header(peer, &refused_call);
  const CallHeader& received = header(index_, peer, call_);
  if (received.call.load(std::memory_order_acquire) != call_) throw_any_refusal();
  if (received.refused != 0) throw_refusal_of(peer);
  require_same_call(peer, received);
}

void Channel::post_chunk(int peer, std::int64_t chunk) {
  // Release: orders the rows before the chunk number. Sequentially consistent because WakeEvent requires it.
  header(peer, index_, call_).chunk.store(static_cast<std::uint64_t>(chunk), std::memory_order_seq_cst);
  rank_.state().control().wake_event(peer).ring();
}

void Channel::wait_chunk(int peer, std::int64_t chunk) {
  const WaitCondition condition{&header(index_, peer, call_).chunk};
  const auto expected = static_cast<std::uint64_t>(chunk);
  if (condition.reached(expected)) return;
  wait_within_limit(condition, {operation_, call_, index_, peer, expected, 0}, expected);
}

// The awaited peer has not posted, but another peer has refused the call: throws that refusal.
void Channel::throw_any_refusal() const {
  for (int peer = 0; peer < ranks_; ++peer) {
    const CallHeader& received = header(index_, peer, call_);
    if (received.call.load(std::memory_order_acquire) == call_ && received.refused != 0)
      throw_refusal_of(peer);
  }
}

void Channel::throw_refusal_of(int peer) const {
  const CallHeader& received = header(index_, peer, call_);
  throw_refusal(peer, static_cast<Operation>(received.operation), call_, received.refusal);
}

void Channel::require_same_call(int peer, const CallHeader& received) const {
  const std::span<const ComparedOption> options(options_.data(), static_cast<std::size_t>(option_count_));
  // In damaged memory the number may be any.
  const int count = std::clamp<int>(received.option_count, 0, kMaxComparedOptions);
  const std::span<const std::int64_t> theirs(received.options.data(), static_cast<std::size_t>(count));
  try {
    ferry::require_same_call({index_, rank_.state().control().epoch(), call_, operation_, options},
                             {peer, received.epoch, static_cast<Operation>(received.operation), theirs});
  } catch (const UsageError&) {
    for (int other = 0; other < ranks_; ++other)
      header(other, index_, call_).found_difference.store(call_, std::memory_order_release);
    throw;
  }
}

void Channel::refuse(Operation operation, const Error& error) noexcept {
  try {
    if (posted_to_all()) {
      wait_for_previous_call();
      assign_call_number(operation, {});
    }
  } catch (...) {
    return;  // the group has failed: no peer waits for this call, and the next begin() throws the failure
  }
  const ErrorRecord refusal = ErrorRecord::of(error);
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != index_ && posted_[peer] != call_) post_refusal(peer, refusal);
  }
}

bool Channel::posted_to_all() const {
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != index_ && posted_[peer] != call_) return false;
  }
  return true;
}

void Channel::post_refusal(int peer, const ErrorRecord& refusal) {
  CallHeader& sent = header(peer, index_, call_);
  sent.operation = static_cast<std::int8_t>(operation_);
  sent.refused = 1;
  sent.epoch = rank_.state().control().epoch();
  sent.option_count = 0;
  sent.refusal = refusal;
  // Release, twice: the first store orders the header before its call number; the second orders both before
  // refused_call, because a waiter that sees refused_call then reads the header.
  sent.call.store(call_, std::memory_order_seq_cst);
  lane_record(peer).refused_call[parity()].store(call_, std::memory_order_seq_cst);
  wake_after_post(peer);
}

}  // namespace ferry
