#include "backends/cuda/engine/staged_communicator.hpp"

#include <algorithm>
#include <utility>

#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/runtime/stream.hpp"

namespace ferry::cuda {
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

}  // namespace

std::unique_ptr<Communicator> stage_device_memory(std::unique_ptr<Communicator> communicator) {
  return std::make_unique<StagedCommunicator>(std::move(communicator));
}

}  // namespace ferry::cuda
