// The link of host ranks that an engine connects: messages are packed into blocks, one for each pair of
// ranks.
#pragma once

#include <memory>

#include "backends/collective/engine_call.hpp"
#include "backends/collective/message_hops.hpp"
#include "backends/cpu/link/peer_link.hpp"

namespace ferry::collective {

class EngineLink final : public cpu::PeerLink {
 public:
  // Arguments as for EngineCall and MessageHops.
  EngineLink(const Rank& rank, std::unique_ptr<Communicator> communicator, int lane,
             std::int64_t summary_bytes, const HopOptions& hops, std::unique_ptr<HopMemory> memory,
             double deadline, std::shared_ptr<TransferThread> ordered)
      : EngineLink(std::make_unique<MessageHops>(rank.topology(), rank.index(), hops, std::move(memory)),
                   rank, std::move(communicator), lane, summary_bytes, hops, deadline, std::move(ordered)) {}

  std::uint64_t begin(Operation operation, std::span<const ComparedOption> options, bool goes_on) override {
    return call_.begin(operation, options, goes_on);
  }
  void go_on() override { call_.go_on(); }
  std::uint64_t call() const override { return call_.call(); }
  std::byte* summary_to(int peer) override { return call_.summary_to(peer); }
  const std::byte* summary_from(int peer) const override { return call_.summary_from(peer); }
  bool packs() const override { return true; }
  void reserve(const cpu::Reservation& messages) override { messages_->reserve(messages); }
  bool has_relays() const override { return has_relays_; }
  std::byte* outgoing(cpu::Staging, int peer) override { return messages_->outgoing(peer); }
  const std::byte* incoming(cpu::Staging, int peer) const override { return messages_->incoming(peer); }
  std::int64_t incoming_bytes(int peer) const override { return messages_->incoming_bytes(peer); }
  Traffic sent_within_node() const override { return messages_->within_node(); }
  Traffic sent_between_nodes() const override { return messages_->between_nodes(); }
  void post(bool split) override { call_.post(split); }
  void wait() override { call_.wait(); }
  void post_chunk(std::int64_t) override {}
  void wait_chunk(int, std::int64_t) override {}
  void refuse(Operation operation, const Error& error) noexcept override {
    call_.refuse(operation, ErrorRecord::of(error));
  }
  void end() noexcept override { call_.end(); }

 private:
  EngineLink(std::unique_ptr<MessageHops> messages, const Rank& rank,
             std::unique_ptr<Communicator> communicator, int lane, std::int64_t summary_bytes,
             const HopOptions& hops, double deadline, std::shared_ptr<TransferThread> ordered)
      : has_relays_(hops.relays),
        messages_(messages.get()),
        call_(rank, std::move(communicator), lane, summary_bytes, std::move(messages), deadline,
              std::move(ordered)) {}

  const bool has_relays_;
  MessageHops* const messages_;  // of call_
  EngineCall call_;
};

}  // namespace ferry::collective
