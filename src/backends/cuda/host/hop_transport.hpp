// What carries messages in two hops: memory of every rank that other ranks write, and the launch that does
// it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "backends/cuda/runtime/launch.hpp"
#include "backends/cuda/two_hops/hop_call.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

class HopTransport {
 public:
  virtual ~HopTransport() = default;

  // Where this rank's kernels reach the memory of a rank. Null if they do not, because the launch puts what
  // is for it.
  virtual std::byte* at(int rank, std::int64_t offset) const = 0;
  // Loads the launch's kernel on the current device.
  virtual void prepare() const = 0;
  virtual void launch(const HopArguments& arguments, const LaunchShape& shape, cudaStream_t stream) const = 0;
};

// Collective. `bytes`: of each rank's memory, zeroed.
using MakeHopTransport = std::function<std::unique_ptr<HopTransport>(const Rank& rank, std::int64_t bytes)>;

// Ranks whose device memory is mapped; nodes are pretended.
std::unique_ptr<HopTransport> mapped_hop_transport(const Rank& rank, std::int64_t bytes);

}  // namespace ferry::cuda
