#include "backends/collective/window_communicator.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/rank_state.hpp"

namespace ferry::collective {
namespace {

// A sender publishes its progress at least this often, so that the receiver copies meanwhile.
constexpr std::int64_t kPieceBytes = 64 << 10;

constexpr double kSleepSeconds = 0.01;  // between two checks

}  // namespace

WindowCommunicator::WindowCommunicator(Rank rank, std::shared_ptr<const SymmetricMemory> memory,
                                       const WindowLayout& layout, int lane, int yields)
    : rank_(std::move(rank)),
      me_(rank_.index()),
      layout_(layout),
      memory_(std::move(memory)),
      begin_(lane * layout.lane_bytes()),
      yields_(yields),
      streams_(static_cast<std::size_t>(layout.ranks)) {}

WindowCommunicator::Pair& WindowCommunicator::pair(int at, int peer) const {
  return *reinterpret_cast<Pair*>(memory_->at(at, begin_ + peer * WindowLayout::kPairBytes));
}

std::byte* WindowCommunicator::window(int at, int from) const {
  return memory_->at(at, begin_ + layout_.pairs_bytes() + from * layout_.window_bytes);
}

// Sequentially consistent, as all accesses to a Pair: WakeEvent requires it. A load of `read` orders what the
// peer has copied out before what this rank writes there next; one of `written` orders the bytes before their
// copy.
std::int64_t WindowCommunicator::room_at(int peer) const {
  const std::uint64_t read = pair(me_, peer).read.load(std::memory_order_seq_cst);
  const std::uint64_t used = streams_[static_cast<std::size_t>(peer)].written - read;
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(layout_.window_bytes) - used);
}

// Bytes of later transfers included.
std::int64_t WindowCommunicator::bytes_from(int peer) const {
  const std::uint64_t written = pair(me_, peer).written.load(std::memory_order_seq_cst);
  return static_cast<std::int64_t>(written - streams_[static_cast<std::size_t>(peer)].read);
}

// `bytes`: room or bytes in a window, which follow from the peer's word.
std::int64_t WindowCommunicator::within_window(int peer, std::int64_t bytes) const {
  if (bytes >= 0 && bytes <= layout_.window_bytes) return bytes;
  throw SystemError(str("the memory that ranks ", me_, " and ", peer, " share is damaged: ", bytes,
                        " bytes in a window of ", layout_.window_bytes),
                    EIO);
}

// True also in damaged memory: then moving throws.
bool WindowCommunicator::can_move(int peer) const {
  const Stream& stream = streams_[static_cast<std::size_t>(peer)];
  return (stream.to_send > 0 && room_at(peer) != 0) || (stream.to_receive > 0 && bytes_from(peer) != 0);
}

bool WindowCommunicator::send_to(int peer, const AllToAllV& transfer) {
  const auto p = static_cast<std::size_t>(peer);
  Stream& stream = streams_[p];
  if (stream.to_send == 0) return false;
  const std::int64_t bytes = std::min({stream.to_send, within_window(peer, room_at(peer)), kPieceBytes});
  if (bytes == 0) return false;
  const std::byte* from =
      transfer.send + transfer.send_offsets[p] + (transfer.send_bytes[p] - stream.to_send);
  std::byte* const to = window(peer, me_);
  const auto begin =
      static_cast<std::int64_t>(stream.written % static_cast<std::uint64_t>(layout_.window_bytes));
  const std::int64_t before_end = std::min(bytes, layout_.window_bytes - begin);
  std::memcpy(to + begin, from, static_cast<std::size_t>(before_end));
  std::memcpy(to, from + before_end, static_cast<std::size_t>(bytes - before_end));
  stream.to_send -= bytes;
  stream.written += static_cast<std::uint64_t>(bytes);
  pair(peer, me_).written.store(stream.written, std::memory_order_seq_cst);
  rank_.state().control().wake_event(peer).ring();
  return true;
}

bool WindowCommunicator::receive_from(int peer, const AllToAllV& transfer) {
  const auto p = static_cast<std::size_t>(peer);
  Stream& stream = streams_[p];
  if (stream.to_receive == 0) return false;
  const std::int64_t bytes = std::min(stream.to_receive, within_window(peer, bytes_from(peer)));
  if (bytes == 0) return false;
  std::byte* const to =
      transfer.receive + transfer.receive_offsets[p] + (transfer.receive_bytes[p] - stream.to_receive);
  const std::byte* const from = window(me_, peer);
  const auto begin =
      static_cast<std::int64_t>(stream.read % static_cast<std::uint64_t>(layout_.window_bytes));
  const std::int64_t before_end = std::min(bytes, layout_.window_bytes - begin);
  std::memcpy(to, from + begin, static_cast<std::size_t>(before_end));
  std::memcpy(to + before_end, from, static_cast<std::size_t>(bytes - before_end));
  stream.to_receive -= bytes;
  stream.read += static_cast<std::uint64_t>(bytes);
  pair(peer, me_).read.store(stream.read, std::memory_order_seq_cst);
  rank_.state().control().wake_event(peer).ring();
  return true;
}

// Serves every peer once, beginning with the next rank, so that not all send to the same one.
bool WindowCommunicator::move_any(const AllToAllV& transfer) {
  bool moved = false;
  for (int step = 1; step < layout_.ranks; ++step) {
    const int peer = (me_ + step) % layout_.ranks;
    moved |= send_to(peer, transfer);
    moved |= receive_from(peer, transfer);
  }
  return moved;
}

bool WindowCommunicator::is_done() const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const Stream& stream) { return stream.to_send == 0 && stream.to_receive == 0; });
}

void WindowCommunicator::all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>&,
                                      const std::function<void()>& check) {
  if (failure_) std::rethrow_exception(failure_);
  for (int peer = 0; peer < layout_.ranks; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    streams_[p].to_send = transfer.send_bytes[p];
    streams_[p].to_receive = transfer.receive_bytes[p];
  }
  try {
    for (int idle = 0; !is_done();) {
      if (move_any(transfer)) {
        idle = 0;
      } else if (++idle <= yields_) {
        sched_yield();
      } else {
        sleep(check);
      }
    }
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

bool WindowCommunicator::can_move_any() const {
  for (int peer = 0; peer < layout_.ranks; ++peer) {
    if (can_move(peer)) return true;
  }
  return false;
}

void WindowCommunicator::sleep(const std::function<void()>& check) {
  rank_.state().control().wake_event(me_).sleep_unless([&] { return can_move_any(); }, kSleepSeconds);
  try {
    check();
  } catch (...) {
    // Looks at the windows after the failure: peers that have finished this transfer may fail the group in a
    // later one, and have sent all that this rank needs.
    if (!can_move_any()) throw;
  }
}

std::unique_ptr<Communicator> make_header_link(const Rank& rank) {
  // Headers of some hundred experts pass at once. A rank whose kernel has ended expects its peers' within the
  // time of their kernels, so that it does not sleep before about a millisecond.
  constexpr std::int64_t kHeaderBytes = 16 << 10;
  constexpr int kYields = 2000;
  const WindowLayout layout{.ranks = rank.size(), .lanes = 1, .window_bytes = kHeaderBytes};
  return std::make_unique<WindowCommunicator>(
      rank, std::make_shared<const SymmetricMemory>(rank, layout.bytes()), layout, 0, kYields);
}

}  // namespace ferry::collective
