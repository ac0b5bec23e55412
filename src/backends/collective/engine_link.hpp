// The link of ranks that an engine connects: one exchange of blocks and one of messages in each call.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <vector>

#include "backends/collective/message_hops.hpp"
#include "backends/collective/pair_blocks.hpp"
#include "backends/cpu/link/peer_link.hpp"
#include "engine/engine.hpp"

namespace ferry::collective {

// In a call all ranks exchange their blocks. If no rank has refused and all have made the same call, and it
// carries messages, the messages follow (message_hops.hpp). All ranks have the same blocks in view, so all
// decide alike.
//
// The exchange runs in the caller's thread, in wait(). After a send phase it runs in a thread, and so does
// that of a refusal, which its rank does not wait for. With ordered lanes every exchange runs in one thread
// for all lanes.
class EngineLink final : public cpu::PeerLink {
 public:
  // `ordered`: the thread of all lanes; null: lanes need no common order.
  EngineLink(Rank rank, std::unique_ptr<Communicator> communicator, int lane, std::int64_t summary_bytes,
             const HopOptions& hops, const MessageMemory& memory, double deadline,
             std::shared_ptr<TransferThread> ordered);
  // What a block holds besides its header.
  static std::int64_t content_bytes(std::int64_t summary_bytes, int ranks, bool relays);
  // Waits for an exchange that has been started.
  ~EngineLink() override;

  std::uint64_t begin(Operation operation, std::span<const CallOption> options) override;
  std::uint64_t call() const override { return call_; }
  std::byte* summary_to(int peer) override { return memory_->blocks.content_to(peer); }
  const std::byte* summary_from(int peer) const override;
  bool packs() const override { return true; }
  void reserve(const cpu::Reservation& messages) override { memory_->messages.reserve(messages); }
  bool has_relays() const override { return has_relays_; }
  std::byte* outgoing(cpu::Staging, int peer) override { return memory_->messages.outgoing(peer); }
  const std::byte* incoming(cpu::Staging, int peer) const override {
    return memory_->messages.incoming(peer);
  }
  std::int64_t incoming_bytes(int peer) const override { return memory_->messages.incoming_bytes(peer); }
  Traffic sent_within_node() const override { return memory_->messages.within_node(); }
  Traffic sent_between_nodes() const override { return memory_->messages.between_nodes(); }
  void post(bool split) override;
  void wait() override;
  void post_chunk(std::int64_t) override {}
  void wait_chunk(int, std::int64_t) override {}
  void refuse(Operation operation, const Error& error) noexcept override;

 private:
  // Owned together, because a transfer that was given up may still use it.
  struct Memory {
    PairBlocks<BlockHeader> blocks;
    MessageHops messages;
  };

  using Check = std::function<void()>;

  void start_in_thread();
  void finish_started();
  void wait_for_started();
  void exchange(const Check& check);
  std::int64_t* table_in(const std::byte* block_content) const;
  void write_headers();
  void exchange_blocks(const Check& check);
  void require_agreement() const;
  void exchange_messages(const Check& check);
  void transfer(const AllToAllV& transfer, const Check& check);
  void check_group() const;
  WaitRecord record() const;
  [[noreturn]] void fail_transfer(int peer) const;
  [[noreturn]] void fail_group(const std::exception_ptr& error) const;

  const Rank rank_;
  const int me_, ranks_, lane_;
  const bool has_relays_;
  const std::int64_t summary_bytes_;  // of a block's content; the table of MessageHops follows
  const double deadline_;
  const std::unique_ptr<Communicator> communicator_;
  const std::shared_ptr<Memory> memory_;

  // The current call.
  std::uint64_t call_ = 0;
  Operation operation_ = Operation::none;
  std::vector<CallOption> options_;
  std::optional<ErrorRecord> refusal_;  // this rank's
  bool begun_ = false;                  // and not posted yet

  const bool ordered_;
  std::shared_ptr<TransferThread> thread_;   // null until needed
  std::future<std::exception_ptr> started_;  // the exchange that runs in the thread
};

}  // namespace ferry::collective
