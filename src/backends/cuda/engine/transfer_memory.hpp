// Device memory for data of damaged plans that exceeds a lane's. It is registered like the lane's memory.
#pragma once

#include <memory>

#include "backends/cuda/host/lane.hpp"
#include "engine/engine.hpp"

namespace ferry::cuda {

class TransferMemory {
 public:
  TransferMemory() = default;
  TransferMemory(std::int64_t bytes, const ExchangeState& exchange, Communicator& communicator)
      : memory_(exchange.memory_for_engine(bytes)),
        registration_(communicator.register_memory(memory_.data(), bytes)) {}

  std::byte* data() const { return memory_.data(); }
  std::int64_t bytes() const { return memory_.bytes(); }

 private:
  DeviceMemory memory_;
  std::shared_ptr<void> registration_;  // ends before the memory is freed
};

}  // namespace ferry::cuda
