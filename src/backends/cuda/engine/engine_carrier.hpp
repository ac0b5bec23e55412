// The backend `collective` on device memory: between the phases of a lane's calls an engine moves the stored
// messages to other ranks.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backends/collective/engine_call.hpp"
#include "backends/collective/message_hops.hpp"
#include "backends/cuda/engine/device_relay.hpp"
#include "backends/cuda/host/carrier.hpp"
#include "backends/cuda/host/exchange_state.hpp"
#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/errors.hpp"
#include "engine/engine.hpp"
#include "exchange/gather.hpp"

namespace ferry::cuda {

// Memory of a lane on its device for messages that travel over an engine. Data of damaged plans that does not
// fit gets further memory, registered like the lane's.
class DeviceHopMemory final : public collective::HopMemory {
 public:
  // `lane`: of the exchange. Both references outlive this. `relays`: two hops, which need a stream of their
  // own.
  DeviceHopMemory(const ExchangeState& exchange, int lane, Communicator& communicator, bool relays)
      : exchange_(exchange), communicator_(communicator), memory_(exchange.engine_lane(lane)) {
    const EngineLayout& layout = *exchange.engine;
    parts_[0].in = layout.first_outbox;
    parts_[1].in = layout.first_inbox;
    parts_[2].in = layout.second_outbox;
    parts_[3].in = layout.second_inbox;
    if (relays) stream_.emplace();
  }

  cudaStream_t stream() const { return stream_->get(); }
  bool on_device() const override { return true; }
  std::byte* room(Part of, std::int64_t bytes) override {
    MemoryPart& part = parts_[static_cast<std::size_t>(of)];
    if (bytes <= part.in.bytes) return memory_ + part.in.begin;
    if (part.more.bytes() < bytes) {
      const ScopedDevice device(exchange_.device);
      part.registration.reset();
      part.more = exchange_.memory_for_engine(bytes);
      part.registration = communicator_.register_memory(part.more.data(), bytes);
    }
    return part.more.data();
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    if (bytes == 0) return;
    const ScopedDevice device(exchange_.device);
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, stream()),
          "copy messages of a relay");
  }
  void finish() override { stream_->synchronize(); }

 private:
  struct MemoryPart {
    LaneRegion in;                       // of the lane's memory
    DeviceMemory more;                   // if that is too small
    std::shared_ptr<void> registration;  // of `more`; ends before it is freed
  };

  const ExchangeState& exchange_;
  Communicator& communicator_;
  std::byte* const memory_;
  std::array<MemoryPart, 4> parts_{};
  std::optional<CudaStream> stream_;
};

// Enqueues a copy between any memory of the host and the device.
void copy_async(void* to, const void* from, std::int64_t bytes, Stream stream);

// Carries a part of a call in three steps:
// 1. post(): copies of its call headers to the host, behind the kernels of the send phase;
// 2. in the thread of the exchange: the wait for these, the exchange of blocks and of messages;
// 3. deliver(): copies of the peers' headers to the device, and what the receive phase needs to know.
// Call headers travel in the blocks, so the host knows how many bytes follow, and no kernel ever waits for a
// peer. Throws what EngineCall throws.
class EngineCarrier final : public Carrier {
 public:
  // `ordered`: see EngineCall. `registration`: of the lanes' memory with the engine; ends before it is freed.
  EngineCarrier(const ExchangeState& exchange, Lane& lane, std::unique_ptr<Communicator> communicator,
                std::shared_ptr<TransferThread> ordered, std::shared_ptr<void> registration);

  void begin(Operation operation, const ComparedOptions& options, CallPart part, Stream stream) override;
  void post(const Stored& stored, bool split, Stream stream) override;
  void deliver(Stream stream) override;
  // Relays work on what the send phase has stored.
  bool keeps_inputs() const override { return !relay_; }
  const std::byte* received_header(int source) override {
    return source == me() ? sent_header(source) : call_.summary_from(source);
  }
  std::optional<SmallResult> run_on_host(const SmallCall& call) override;
  void refuse(Operation operation, const ErrorRecord& error, cudaStream_t) override {
    call_.refuse(operation, error);
  }
  void add_wire(WireCounts& counts) const override { counts_.add_to(counts); }

 private:
  // In pinned memory, beside the headers.
  struct Scalars {
    std::int32_t messages[kMaxDeviceRanks];  // to each rank, or rows
    std::int32_t planned[kMaxDeviceRanks];   // messages from each rank, as the plan has it
    std::int32_t relayed[kMaxDeviceRanks];   // DeviceRelay::Setup::counts
    std::int32_t count;
    alignas(8) std::byte joined[NumberCall::kMostResultBytes];
  };

  int me() const { return exchange_.me(); }
  int ranks() const { return exchange_.rank.size(); }
  const EngineLayout& layout() const { return *exchange_.engine; }
  std::byte* memory() const { return exchange_.engine_lane(lane_.index()); }
  std::byte* sent_header(int rank) const { return headers_.data() + rank * layout().header_bytes; }
  std::byte* delivered_header(int rank) const { return sent_header(ranks() + rank); }
  Scalars& scalars() const { return *reinterpret_cast<Scalars*>(scalars_.data()); }

  // The messages of the current call.
  bool packed() const { return stored_.content == Stored::Content::rows; }
  std::int64_t message_bytes() const;
  std::int64_t metadata_offset() const { return align_up(stored_.part_bytes, 16); }

  void require_no_capture(Operation operation, Stream stream) const;
  std::unique_ptr<collective::MessageHops> make_messages(Communicator& communicator);
  void add_for_relay(std::span<const ArrivedRows> rows, std::byte* out, std::int32_t* count,
                     cudaStream_t stream) const;
  void fetch(Stream stream);
  void fetch_headers(Stream stream);
  void prepare(const collective::EngineCall::Check& check);
  void describe();
  void reserve(const std::vector<std::int64_t>& messages);
  void wait();
  void deliver_headers(Stream stream);
  void clear_missing(Stream stream) const;
  void mark_arrived(Stream stream) const;
  void find_rows(Stream stream) const;
  template <JoinsNumbers Call>
  SmallResult run(const Call& call);
  // engine_gather.cpp
  SmallResult run(const GatherCall& call);
  std::int64_t count_of(const GatherCall& call);
  std::int64_t gather_round_bytes() const;
  collective::SentMessages pack_round(const GatherRounds& rounds, std::int64_t begin,
                                      std::int64_t round_bytes, Stream stream);
  void add_blocks(std::span<const void* const> blocks, DType type, void* sums, std::int64_t bytes,
                  Stream stream) const;

  const ExchangeState& exchange_;
  Lane& lane_;
  const std::shared_ptr<void> registration_;

  // The current call.
  Operation operation_ = Operation::none;
  CallPart part_ = CallPart::whole;
  Stored stored_;
  std::function<void()> agreed_;    // SentMessages::agreed
  bool headers_delivered_ = false;  // copies of the peers' headers are enqueued

  PinnedMemory headers_;  // [2, R] sent and received
  PinnedMemory scalars_;  // Scalars
  CudaEvent fetched_;     // the send phase has ended, and its headers are here
  LaneCounts counts_;
  std::optional<DeviceRelay> relay_;         // two hops
  collective::MessageHops* const messages_;  // of call_
  collective::EngineCall call_;              // last: its destructor waits for a thread that uses the rest
};

}  // namespace ferry::cuda
