// The launch between the phases of a call over NVSHMEM, for groups of more than kNarrowRanks ranks.
#define FERRY_WIDE_KERNELS
#include "backends/nvshmem/module/wide_hops.hpp"

#include "backends/nvshmem/module/hop_kernel.cuh"

namespace ferry::nvshmem {

int prepare_wide_hops() {
  return prepare_hop_kernel();
}

int launch_wide_hops(const cuda::HopArguments& arguments, const Peers& peers, const HopLaunch& launch) {
  return launch_hop_kernel(arguments, peers, launch);
}

}  // namespace ferry::nvshmem
