// The backend of experts with replicas on device memory, around a cuda backend. The choice is a kernel of its
// own in front of the dispatch, so the kernels of dispatches are the same with and without replicas.
#include <algorithm>

#include "backends/cuda/host/call_pointers.hpp"
#include "backends/cuda/host/cuda_backend.hpp"
#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/replicas/choose.cuh"
#include "backends/cuda/runtime/run_kernel.cuh"
#include "backends/cuda/runtime/stream.hpp"
#include "exchange/replicas.hpp"

namespace ferry {
namespace cuda {
namespace {

const auto kChooseKernel =
    kernel_of<ReplicaChoice, choose_replicas, kChoiceThreads>("launch the choice of replicas");

class DeviceReplicaLane final : public ReplicaLane {
 public:
  DeviceReplicaLane(CudaBackend& cuda, int lane, std::int64_t bytes)
      : cuda_(cuda), lane_(lane), memory_(bytes) {}

  std::byte* memory() override { return memory_.data(); }
  void write(void* to, const void* from, std::int64_t bytes) override { copy_blocking(to, from, bytes); }
  void check_pointers(const DispatchCall& call) const override {
    cuda_.require_usable(lane_, to_string(Operation::dispatch), pointers_of(call));
  }
  void check_pointers(const DispatchCountsCall& call) const override {
    cuda_.require_usable(lane_, to_string(Operation::dispatch_counts), pointers_of(call));
  }
  void choose(const ReplicaChoice& choice, const CallOptions& call) override {
    const int items = std::max(choice.tokens * choice.top_k, choice.scale_count);
    const int limit = cuda_.blocks_of_lane(),
              most = call.sm_limit > 0 ? std::min<int>(call.sm_limit, limit) : limit;
    const int blocks = std::min((items + kChoiceThreads - 1) / kChoiceThreads, most);
    kChooseKernel(choice, {.blocks = blocks}, call.stream);
  }

 private:
  CudaBackend& cuda_;
  const int lane_;
  DeviceMemory memory_;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Backend> make_device_replica_backend(const Rank& rank, const Config& config,
                                                     std::unique_ptr<Backend> inner) {
  auto& cuda = dynamic_cast<cuda::CudaBackend&>(*inner);
  std::vector<std::unique_ptr<ReplicaLane>> lanes;
  for (int lane = 0; lane < config.lanes; ++lane)
    lanes.push_back(
        std::make_unique<cuda::DeviceReplicaLane>(cuda, lane, replica_lane_bytes(config, rank.index())));
  return wrap_in_replicas(rank, config, std::move(inner), std::move(lanes));
}

}  // namespace ferry
