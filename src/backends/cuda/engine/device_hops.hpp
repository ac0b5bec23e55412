// Carries the messages of a call between memory of the ranks' devices in two hops, by relays, as MessageHops
// does between host memory. A token's payload travels once to each other node (operations/bundles.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "backends/collective/device_messages.hpp"
#include "backends/collective/pair_blocks.hpp"
#include "backends/cuda/engine/transfer_memory.hpp"
#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/operations/bundles.hpp"
#include "backends/cuda/runtime/cuda_stream.hpp"

namespace ferry::cuda {

inline std::size_t at(int rank) {
  return static_cast<std::size_t>(rank);
}

class DeviceHops final : public collective::DeviceMessages {
 public:
  // The kind of messages that a call has.
  struct Kind {
    bool rows;  // packed rows, to the tokens' source ranks; otherwise messages, to the experts
    // Messages:
    BundleSizes sizes;
    const std::int32_t* sent_tokens;  // [R, T] of the plan, in device memory
    // Rows:
    bool adds;  // by node
  };

  // `lane`: number `index` of the exchange. All outlive every exchange().
  DeviceHops(const ExchangeState& exchange, const Lane& lane, int index, Communicator& communicator);

  void clear() override {
    DeviceMessages::clear();
    in_second_hop_ = straight_ = false;
  }
  // Before reserve().
  void start(const Kind& kind) { kind_ = kind; }
  // Called in its place: the messages of this call go straight to their ranks, as with one hop.
  void start_straight() { straight_ = true; }
  // Packs the data for other nodes, and waits for that. The messages must have been stored.
  void reserve(Outgoing messages) override;

  // Tables have an entry for every rank.
  collective::TableBytes tables() const override {
    const std::vector<std::int64_t> bytes(at(ranks_), 8 * std::int64_t{ranks_});
    return {bytes, bytes};
  }
  collective::FollowingMessages announce(int peer, std::int64_t* table) const override;
  void exchange(std::uint64_t call, const std::function<collective::FollowingMessages(int peer)>& following,
                const std::function<const std::int64_t*(int peer)>& table, const Wire& wire) override;
  bool in_second_hop() const override { return in_second_hop_; }
  int relay_from(int peer) const override {
    return collective::relay_between(topology_, direction(), peer, me_);
  }
  bool is_relay(int peer) const override { return collective::is_relay(topology_, direction(), peer, me_); }
  WaitRole role(int peer) const override {
    if (straight_) return WaitRole::none;
    return collective::role_towards(topology_, direction(), in_second_hop_, peer, me_);
  }

 private:
  using Following = std::vector<collective::FollowingMessages>;
  using Tables = std::function<const std::int64_t*(int peer)>;

  // Data that this rank sends, or receives, in a hop: a block for each rank, at `base` + offset.
  struct Blocks {
    std::byte* base = nullptr;
    std::vector<std::int64_t> bytes, offsets;  // [R]

    std::byte* block(int rank) const { return base + offsets[static_cast<std::size_t>(rank)]; }
  };
  // A part of the lane's memory, and further memory for data of damaged plans that does not fit.
  struct Region {
    std::byte* data;
    std::int64_t bytes;
    TransferMemory more;
  };

  cpu::Direction direction() const {
    return kind_.rows ? cpu::Direction::to_sources : cpu::Direction::to_experts;
  }
  int first_stop(int final) const;
  bool relays_for(int rank) const;
  Region region(const LaneRegion& in) const;
  std::byte* room_in(Region& region, std::int64_t bytes) const;
  Blocks empty_blocks(std::byte* base) const;
  void place(Blocks& blocks, Region& region) const;
  void write_bundles();
  void pack_rows();
  void copy(void* to, const void* from, std::int64_t bytes) const;
  void transfer(const Blocks& sent, const Blocks& received, const Following& following,
                const Wire& wire) const;

  void exchange_messages(std::uint64_t call, const Following& first, const Tables& table, const Wire& wire);
  void open_bundles(const Blocks& received, const Tables& table, const Wire& wire);
  void exchange_rows(std::uint64_t call, const Following& first, const Tables& table, const Wire& wire);
  void forward_rows(const std::vector<std::vector<ArrivedRows>>& held);
  void second_hop(std::uint64_t call, const Wire& wire);
  void deliver(int rank, const std::byte* data, std::int64_t bytes, const Wire& wire);

  const ExchangeState& exchange_;
  const Lane& lane_;
  Communicator& communicator_;
  const int ranks_, node_;
  const EngineLayout& layout_;
  std::byte* const memory_;  // the lane's memory
  CudaStream stream_;
  PinnedMemory counts_;  // int32 [R], which kernels write
  Region first_outbox_, first_inbox_, second_outbox_, second_inbox_;
  collective::PairBlocks<collective::SecondHopHeader> second_headers_;  // with a table: bytes from each rank

  // The current call.
  Kind kind_{};
  bool in_second_hop_ = false, straight_ = false;
  Blocks first_;                        // sent in the first hop
  std::vector<std::int64_t> table_;     // [R] bytes for each rank in the block for its first stop
  std::vector<std::int64_t> payloads_;  // [nodes] in the bundle for it
  Blocks second_, second_received_;     // in the second
};

}  // namespace ferry::cuda
