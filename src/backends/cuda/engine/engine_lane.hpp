// A lane of the backend `collective` on device memory: launches the phases of a cuda lane, and between them
// moves the stored messages to other ranks by an engine.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backends/collective/engine_call.hpp"
#include "backends/collective/hop_memory.hpp"
#include "backends/cuda/engine/device_relay.hpp"
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

// The steps of a call:
// 1. begin, the kernel of the send phase, and copies of its call headers to the host;
// 2. in the thread of the exchange: the wait for that kernel, the exchange of blocks and of messages;
// 3. copies of the peers' headers to the device, and the kernel of the receive phase.
// Call headers travel in the blocks, so the host knows how many bytes follow, and no kernel ever waits for a
// peer.
//
// After a send phase the calls are those of Backend; all throw what EngineCall throws.
class EngineLane {
 public:
  // `ordered`: see EngineCall. `lane` outlives this.
  EngineLane(const ExchangeState& exchange, Lane& lane, int index, std::unique_ptr<Communicator> communicator,
             std::shared_ptr<TransferThread> ordered);

  // `split`: the receive phase comes later. Otherwise it must follow at once.
  void dispatch_send(const DispatchCall& call, bool split, Stream stream);
  DispatchResult dispatch_receive(Stream stream);
  void combine_send(const CombineCall& call, bool split, Stream stream);
  void combine_receive(Stream stream);
  // A whole small call.
  SmallResult run(const SmallCall& call, Stream stream) {
    return std::visit([&](const auto& each) { return run(each, stream); }, call);
  }
  void refuse(Operation operation, const Error& error) noexcept {
    call_.refuse(operation, ErrorRecord::of(error));
  }

  void add_wire(WireCounts& counts) const { counts_.add_to(counts); }

 private:
  // The messages that a send phase has stored.
  struct Stored {
    std::int64_t message_bytes;
    const std::int32_t* messages;      // [R] to each rank, in device memory; null: read from the call headers
    bool packed;                       // rows of a combine
    std::int64_t metadata_offset = 0;  // of slot metadata in a message
    const std::int32_t* sent_tokens = nullptr;  // PlanView::sent_tokens
    // By a plan: the counts of all messages, int32 [R, R] in device memory.
    const std::int32_t* planned = nullptr;
    int hash_option = -1;  // replicated input, from ids: index of the option that the call headers hold
    std::function<void()> agreed = nullptr;  // SentMessages::agreed
  };

  // In pinned memory, beside the headers.
  struct Scalars {
    std::int32_t messages[kMaxDeviceRanks];
    std::int32_t planned[kMaxDeviceRanks];  // messages from each rank, as the plan has it
    std::int32_t relayed[kMaxDeviceRanks];  // DeviceRelay::Setup::counts
    std::int32_t count;
    StepMetadata metadata;
  };

  int me() const { return exchange_.me(); }
  int ranks() const { return exchange_.rank.size(); }
  const EngineLayout& layout() const { return *exchange_.engine; }
  std::byte* memory() const { return exchange_.engine_lane(index_); }
  std::byte* sent_header(int rank) const { return headers_.data() + rank * layout().header_bytes; }
  std::byte* received_header(int rank) const { return sent_header(ranks() + rank); }
  Scalars& scalars() const { return *reinterpret_cast<Scalars*>(scalars_.data()); }

  // Runs `part` of a call. If it throws, refuses the call that has begun, or else the next one, so that the
  // peers get the error instead of waiting.
  template <class Part>
  void run_or_refuse(Operation operation, Part part) {
    or_refuse<std::exception>(
        [&](const std::exception&) { call_.refuse(operation, ErrorRecord::of(std::current_exception())); },
        part);
  }
  // Whether the inputs stay as they are until the receive phase has run. Relays work on what the send phase
  // has stored.
  bool keeps_inputs(bool split) const { return !split && !relay_; }
  std::unique_ptr<collective::MessageHops> make_messages(Communicator& communicator);
  void fetch_headers(Stream stream);
  void post(Operation operation, bool split, std::optional<Stored> stored, Stream stream);
  void fetch(const std::optional<Stored>& stored, Stream stream);
  void describe(const Stored& stored);
  void reserve(const Stored& stored, const std::vector<std::int64_t>& messages);
  Stored by_plan(const Plan& plan, std::int64_t part_bytes) const;
  void wait();
  void deliver(Stream stream);
  void deliver_headers(Stream stream);
  void clear_missing(Stream stream);
  SmallResult run(const MetadataCall& call, Stream stream);
  SmallResult run(const RouteValuesCall& call, Stream stream);
  SmallResult run(const DispatchCountsCall& call, Stream stream);
  // engine_gather.cpp
  SmallResult run(const GatherCall& call, Stream stream);
  std::int64_t count_of(const GatherCall& call, Stream stream);
  std::int64_t gather_round_bytes() const;
  collective::SentMessages pack_round(const GatherRounds& rounds, std::int64_t begin,
                                      std::int64_t round_bytes, Stream stream);

  const ExchangeState& exchange_;
  Lane& lane_;
  const int index_;
  std::optional<Stored> sent_;      // in the current call
  bool headers_delivered_ = false;  // the same: copies of the peers' headers are enqueued
  PinnedMemory headers_;            // [2, R] sent and received
  PinnedMemory scalars_;            // Scalars
  CudaEvent stored_;                // the send phase has ended, and its headers are here
  LaneCounts counts_;
  std::optional<DeviceRelay> relay_;         // two hops
  collective::MessageHops* const messages_;  // of call_
  collective::EngineCall call_;              // last: its destructor waits for a thread that uses the rest
};

}  // namespace ferry::cuda
