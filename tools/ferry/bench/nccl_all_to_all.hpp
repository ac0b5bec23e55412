// An all-to-all-v with NCCL alone, beside which the benchmarks time Ferry's calls.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "backends/cuda/runtime/stream.hpp"
#include "engine/nccl_library.hpp"
#include "ferry/group.hpp"
#include "tools/ferry/bench/traffic.hpp"

namespace ferry::app {

// Its communicator has the current GPUs of all ranks.
class NcclAllToAll {
 public:
  // Collective.
  NcclAllToAll(const Rank& rank, const Nccl& nccl) : nccl_(nccl) {
    std::vector<Nccl::UniqueId> ids(at(rank.size()));
    Nccl::UniqueId mine{};
    if (rank.index() == 0) nccl_.require(nccl_.unique_id(&mine), "ncclGetUniqueId");
    rank.all_gather(&mine, ids.data(), sizeof mine);
    nccl_.require(nccl_.init_rank(&comm_, rank.size(), ids[0], rank.index()), "ncclCommInitRank");
  }
  ~NcclAllToAll() { nccl_.destroy(comm_); }
  NcclAllToAll(const NcclAllToAll&) = delete;
  NcclAllToAll& operator=(const NcclAllToAll&) = delete;

  std::string version() const { return nccl_.version_text(); }

  // Enqueues the transfer of buffers in which the pieces of the peers follow one another.
  void enqueue(const std::byte* from, std::byte* to, const PeerBytes& transfer,
               const cuda::CudaStream& stream) const {
    nccl_.require(nccl_.group_start(), "ncclGroupStart");
    for (std::size_t peer = 0; peer < transfer.send.size(); ++peer) {
      const int rank = static_cast<int>(peer);
      const std::size_t out = at(transfer.send[peer]), in = at(transfer.receive[peer]);
      if (out > 0) nccl_.require(nccl_.send(from, out, Nccl::kBytes, rank, comm_, stream.get()), "ncclSend");
      if (in > 0) nccl_.require(nccl_.receive(to, in, Nccl::kBytes, rank, comm_, stream.get()), "ncclRecv");
      from += out;
      to += in;
    }
    nccl_.require(nccl_.group_end(), "ncclGroupEnd");
  }

 private:
  const Nccl& nccl_;
  Nccl::Comm comm_ = nullptr;
};

}  // namespace ferry::app
