// An all-to-all-v with NCCL alone, beside which calls over engines are timed.
#pragma once

#include <cstddef>
#include <string>

#include "backends/cuda/runtime/stream.hpp"
#include "engine/nccl_library.hpp"
#include "ferry/group.hpp"
#include "tools/ferry/bench/engine_transfers.hpp"

namespace ferry::app {

// A communicator of the current GPUs of all ranks, which are processes.
class NcclAllToAll {
 public:
  // Collective.
  explicit NcclAllToAll(const Rank& rank);
  ~NcclAllToAll();
  NcclAllToAll(const NcclAllToAll&) = delete;
  NcclAllToAll& operator=(const NcclAllToAll&) = delete;

  std::string version() const { return nccl_.version_text(); }

  // Enqueues the transfer of buffers in which the pieces of the peers follow one another.
  void enqueue(const std::byte* from, std::byte* to, const PeerBytes& transfer,
               const cuda::CudaStream& stream);

 private:
  const Nccl& nccl_;
  Nccl::Comm comm_ = nullptr;
};

}  // namespace ferry::app
