// The link of ranks that share memory: messages are written into the receiver's staging.
#pragma once

#include "backends/cpu/link/peer_link.hpp"
#include "layout/exchange_layout.hpp"
#include "memory/symmetric_memory.hpp"

namespace ferry::cpu {

class SharedLink final : public PeerLink {
 public:
  // Local. `memory` is laid out by `layout` and outlives the link.
  SharedLink(const Rank& rank, const SymmetricMemory& memory, const ExchangeLayout& layout, int lane,
             std::int64_t summary_bytes, double deadline);

  std::uint64_t begin(Operation operation, std::span<const CallOption> options) override {
    return channel_.begin(operation, options);
  }
  std::uint64_t call() const override { return channel_.call(); }
  std::byte* summary_to(int peer) override { return channel_.summary_to(peer); }
  const std::byte* summary_from(int peer) const override { return channel_.summary_from(peer); }
  bool packs() const override { return false; }
  void reserve(const Reservation&) override {}
  std::byte* outgoing(Staging staging, int peer) override { return staged(staging, peer, rank_); }
  const std::byte* incoming(Staging staging, int peer) const override { return staged(staging, rank_, peer); }
  std::int64_t incoming_bytes(int) const override { return 0; }
  void post(bool split) override;
  void wait() override;
  void post_chunk(std::int64_t chunk) override;
  void wait_chunk(int peer, std::int64_t chunk) override { channel_.wait_chunk(peer, chunk); }
  void refuse(Operation operation, const Error& error) noexcept override {
    channel_.refuse(operation, error);
  }

 private:
  std::byte* staged(Staging staging, int at, int source) const;

  const SymmetricMemory& memory_;
  const ExchangeLayout& layout_;
  const int lane_, rank_, ranks_;
  Channel channel_;
};

}  // namespace ferry::cpu
