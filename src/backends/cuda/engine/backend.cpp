// The backend `collective` on device memory: the kernels of the cuda backend, with messages carried by an
// engine.
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "backends/collective/window_communicator.hpp"
#include "backends/cuda/engine/engine_carrier.hpp"
#include "backends/cuda/host/cuda_backend.hpp"
#include "backends/cuda/host/memory_layout.hpp"
#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/memory/symmetric.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "engine/engine.hpp"
#include "engine/nccl_library.hpp"
#include "ferry/group.hpp"

namespace ferry {
namespace cuda {
namespace {

// The pinned memory of one side of a transfer: the bytes of all ranks one behind another.
struct Pinned {
  PinnedMemory memory;
  std::vector<std::int64_t> offsets;

  void place(std::span<const std::int64_t> bytes) {
    offsets.clear();
    std::int64_t end = 0;
    for (const std::int64_t each : bytes) {
      offsets.push_back(end);
      end += each;
    }
    if (memory.bytes() < end) memory = PinnedMemory(end);
  }
};

class StagedCommunicator final : public Communicator {
 public:
  explicit StagedCommunicator(std::unique_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)), staging_(std::make_shared<Staging>()) {
    check(cudaGetDevice(&device_), "find the current device");
  }

  void all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>& keep,
                    const std::function<void()>& check_wait) override {
    if (!transfer.device) return communicator_->all_to_all_v(transfer, keep, check_wait);
    const ScopedDevice device(device_);
    Pinned &sent = staging_->sent, &received = staging_->received;
    sent.place(transfer.send_bytes);
    received.place(transfer.receive_bytes);
    for (std::size_t peer = 0; peer < sent.offsets.size(); ++peer)
      copy(sent.memory.data() + sent.offsets[peer], transfer.send + transfer.send_offsets[peer],
           transfer.send_bytes[peer]);
    finish_copies(check_wait);
    communicator_->all_to_all_v({.send = sent.memory.data(),
                                 .send_bytes = transfer.send_bytes,
                                 .send_offsets = sent.offsets,
                                 .receive = received.memory.data(),
                                 .receive_bytes = transfer.receive_bytes,
                                 .receive_offsets = received.offsets},
                                std::make_shared<Kept>(Kept{keep, staging_}), check_wait);
    for (std::size_t peer = 0; peer < received.offsets.size(); ++peer)
      copy(transfer.receive + transfer.receive_offsets[peer], received.memory.data() + received.offsets[peer],
           transfer.receive_bytes[peer]);
    finish_copies(check_wait);
  }

 private:
  // Owned by the transfer, which may still use it after it was given up.
  struct Staging {
    Pinned sent, received;
  };
  struct Kept {
    std::shared_ptr<void> callers;
    std::shared_ptr<Staging> staging;
  };

  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream_.get()),
          "copy messages through pinned memory");
  }
  void finish_copies(const std::function<void()>& check_wait) {
    copied_.record(stream_.get());
    copied_.wait(check_wait);
  }

  std::unique_ptr<Communicator> communicator_;
  std::shared_ptr<Staging> staging_;
  int device_ = 0;
  CudaStream stream_;
  CudaEvent copied_;
};

// Takes host and device memory of the device that is current at construction.
std::unique_ptr<Communicator> stage_device_memory(std::unique_ptr<Communicator> communicator) {
  return std::make_unique<StagedCommunicator>(std::move(communicator));
}

class CudaDeviceStream final : public DeviceStream {
 public:
  CudaDeviceStream() { check(cudaGetDevice(&device_), "find the current device"); }

  void* handle() const override { return stream_.get(); }

  std::byte* memory(std::int64_t bytes) override {
    const ScopedDevice device(device_);
    if (memory_.bytes() < bytes) memory_ = DeviceMemory(bytes);
    return memory_.data();
  }
  void copy(void* to, const void* from, std::int64_t bytes) override {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream_.get()),
          "copy for NCCL");
  }
  void wait(const std::function<void()>& check_wait) override {
    done_.record(stream_.get());
    done_.wait(check_wait);
  }

 private:
  int device_ = 0;
  CudaStream stream_;
  CudaEvent done_;
  DeviceMemory memory_;
};

// Access to the current device, for exchanges of `rank`.
DeviceAccess access_current_device(const Rank& rank) {
  int device = 0;
  check(cudaGetDevice(&device), "find the current device");
  return {.id = id_of_current_device(),
          .make_stream = [] { return std::make_unique<CudaDeviceStream>(); },
          .select = [device] { check(cudaSetDevice(device), "select a device"); },
          .make_host_link = [rank] { return collective::make_header_link(rank); }};
}

// `given`: the engine that the group has brought; null: NCCL.
void set_engine_carriers(Engine* given, const ExchangeState& exchange, std::deque<Lane>& lanes) {
  Engine& engine = given != nullptr ? *given
                                    : nccl_engine_of(exchange.rank.state(), exchange.config.deadline,
                                                     access_current_device(exchange.rank));
  std::vector<std::unique_ptr<Communicator>> communicators = engine.communicators(exchange.config.lanes);
  std::shared_ptr<void> registration;
  if (exchange.registers) {
    const DeviceMemory& memory = exchange.engine_memory;  // of all lanes
    registration = communicators.front()->register_memory(memory.data(), memory.bytes());
  }
  for (Lane& lane : lanes) {
    std::unique_ptr<Communicator>& made = communicators[at(lane.index())];
    if (!engine.takes_device_memory()) made = stage_device_memory(std::move(made));
    lane.carry_by(std::make_unique<EngineCarrier>(exchange, lane, std::move(made),
                                                  engine.ordered_lanes() ? engine.transfer_thread() : nullptr,
                                                  registration));
  }
}

}  // namespace
}  // namespace cuda

void require_nccl() {
  load_nccl();
}

std::unique_ptr<Backend> make_device_collective_backend(const Rank& rank, const Config& config,
                                                        Engine* engine) {
  cuda::check_limits(config);
  return std::make_unique<cuda::CudaBackend>(rank, config, cuda::Reach::engine,
                                             std::bind_front(cuda::set_engine_carriers, engine));
}

}  // namespace ferry
