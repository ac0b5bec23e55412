// Carries transfers through shared memory, in windows whose size does not depend on the size of a transfer.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "engine/engine.hpp"
#include "ferry/group.hpp"
#include "memory/symmetric_memory.hpp"

namespace ferry::collective {

// On every rank, for each lane: the state of each pair with a peer, then a window for each peer.
struct WindowLayout {
  int ranks, lanes;
  std::int64_t window_bytes;  // what a rank may have on its way to another one; a multiple of 64

  static constexpr std::int64_t kPairBytes = 128;

  constexpr std::int64_t pairs_bytes() const { return ranks * kPairBytes; }
  constexpr std::int64_t windows_bytes() const { return ranks * window_bytes; }
  constexpr std::int64_t lane_bytes() const { return pairs_bytes() + windows_bytes(); }
  constexpr std::int64_t bytes() const { return lanes * lane_bytes(); }
};

// The ranks of one host. The bytes from one rank to another form one stream over all transfers of the lane.
// It passes through a window in the receiver's memory: the sender writes while there is room, and the
// receiver copies the bytes out and returns the room.
//
// Why every transfer ends, with a window of any size. A rank in a transfer serves all peers: it sends where
// there is room and takes what has arrived for this transfer. Among the ranks that have not finished,
// consider those with the lowest transfer: they wait only for one another, since all others have sent and
// taken all bytes of it. Two of them that wait for each other cannot both be stuck: a full window has bytes
// to take, and one that is not full has room.
class WindowCommunicator final : public Communicator {
 public:
  static constexpr int kYields = 50;

  // Local. `memory`: layout.bytes() on every rank. `yields`: how often a wait yields its core before it
  // sleeps.
  WindowCommunicator(Rank rank, std::shared_ptr<const SymmetricMemory> memory, const WindowLayout& layout,
                     int lane, int yields = kYields);

  // Copies in and out, so it never needs `keep`.
  void all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>& keep,
                    const std::function<void()>& check) override;

 private:
  // Progress of the two streams between a rank and a peer, in bytes. In the memory of that rank, written by
  // the peer.
  struct Pair {
    alignas(64) std::atomic<std::uint64_t> written;  // to the peer's window here
    alignas(64) std::atomic<std::uint64_t> read;     // from this rank's window at the peer
  };
  static_assert(sizeof(Pair) == WindowLayout::kPairBytes);

  // Both streams with a peer, in this rank's own bookkeeping.
  struct Stream {
    std::uint64_t written = 0, read = 0;       // over all transfers
    std::int64_t to_send = 0, to_receive = 0;  // bytes left of the current transfer
  };

  Pair& pair(int at, int peer) const;
  std::byte* window(int at, int from) const;
  std::int64_t room_at(int peer) const;
  std::int64_t bytes_from(int peer) const;
  std::int64_t within_window(int peer, std::int64_t bytes) const;
  bool can_move(int peer) const;
  bool can_move_any() const;
  bool send_to(int peer, const AllToAllV& transfer);
  bool receive_from(int peer, const AllToAllV& transfer);
  bool move_any(const AllToAllV& transfer);
  bool is_done() const;
  void sleep(const std::function<void()>& check);

  const Rank rank_;
  const int me_;
  const WindowLayout layout_;
  const std::shared_ptr<const SymmetricMemory> memory_;
  const std::int64_t begin_;  // offset of this lane's part of the memory
  const int yields_;
  std::vector<Stream> streams_;  // [R]
  std::exception_ptr failure_;   // of an earlier transfer
};

// Collective over the ranks of one host: for the call headers of ranks whose messages travel between devices.
std::unique_ptr<Communicator> make_header_link(const Rank& rank);

}  // namespace ferry::collective
