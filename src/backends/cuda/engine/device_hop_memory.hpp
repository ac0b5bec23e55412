// Memory of a lane on its device for messages that travel over an engine. Data of damaged plans that does not
// fit gets further memory, registered like the lane's.
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "backends/collective/hop_memory.hpp"
#include "backends/cuda/host/exchange_state.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "engine/engine.hpp"

namespace ferry::cuda {

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

}  // namespace ferry::cuda
