#include "tools/ferry/bench/nccl_all_to_all.hpp"

#include <vector>

namespace ferry::app {

NcclAllToAll::NcclAllToAll(const Rank& rank) : nccl_(load_nccl()) {
  std::vector<Nccl::UniqueId> ids(static_cast<std::size_t>(rank.size()));
  Nccl::UniqueId mine{};
  if (rank.index() == 0) nccl_.require(nccl_.unique_id(&mine), "ncclGetUniqueId");
  rank.all_gather(&mine, ids.data(), sizeof mine);
  nccl_.require(nccl_.init_rank(&comm_, rank.size(), ids[0], rank.index()), "ncclCommInitRank");
}

NcclAllToAll::~NcclAllToAll() {
  nccl_.destroy(comm_);
}

void NcclAllToAll::enqueue(const std::byte* from, std::byte* to, const PeerBytes& transfer,
                           const cuda::CudaStream& stream) {
  nccl_.require(nccl_.group_start(), "ncclGroupStart");
  for (std::size_t peer = 0; peer < transfer.send.size(); ++peer) {
    const int rank = static_cast<int>(peer);
    const auto out = static_cast<std::size_t>(transfer.send[peer]),
               in = static_cast<std::size_t>(transfer.receive[peer]);
    if (out > 0) nccl_.require(nccl_.send(from, out, Nccl::kBytes, rank, comm_, stream.get()), "ncclSend");
    if (in > 0) nccl_.require(nccl_.receive(to, in, Nccl::kBytes, rank, comm_, stream.get()), "ncclRecv");
    from += out;
    to += in;
  }
  nccl_.require(nccl_.group_end(), "ncclGroupEnd");
}

}  // namespace ferry::app
