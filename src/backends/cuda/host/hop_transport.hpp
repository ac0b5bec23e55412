// The transport of two hops on the backend `cuda`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "backends/cuda/runtime/launch.hpp"
#include "backends/cuda/two_hops/hop_call.hpp"
#include "exchange/backend.hpp"
#include "ferry/config.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

// Memory on every rank that other ranks write, and the launch that moves the messages.
class HopTransport {
 public:
  virtual ~HopTransport() = default;

  // Address of a rank's memory for this rank's kernels, by which they store there or the launch puts. Null if
  // it is not mapped.
  virtual std::byte* at(int rank, std::int64_t offset) const = 0;
  // Collective. Call it once, with the device memory that messages may be put from. It must outlive this
  // object.
  virtual void register_sources(std::byte* memory, std::int64_t bytes) = 0;
  // Whether puts may still read that memory. After a failure of the group nobody waits for them, so the
  // memory must never be freed.
  virtual bool keeps_sources() const = 0;
  // Loads the launch's kernel on the current device.
  virtual void prepare() const = 0;
  virtual void launch(const HopArguments& arguments, const LaunchShape& shape, cudaStream_t stream) const = 0;
};

// Collective. `bytes`: of each rank's memory, zeroed.
using MakeHopTransport = std::function<std::unique_ptr<HopTransport>(const Rank& rank, std::int64_t bytes)>;

// Collective. The backend `cuda` in two hops. Throws UnsupportedError for more ranks than the kernels take.
std::unique_ptr<Backend> make_relayed_backend(const Rank& rank, const Config& config,
                                              const MakeHopTransport& make_hops);

}  // namespace ferry::cuda
