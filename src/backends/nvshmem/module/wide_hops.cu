// The launch between the phases of a call over NVSHMEM, for groups of more than kNarrowRanks ranks.
//
// NVSHMEM's device code is a library, so the module's device code is linked across files. Functions of narrow
// and wide kernels have the same names, and the linker would keep one of each. Hence everything of Ferry is
// in another namespace here. No type depends on which kernels a file compiles, unless only device code uses
// it.
#define FERRY_WIDE_KERNELS
#define ferry ferry_wide
#include "backends/nvshmem/module/wide_hops.hpp"

#include "backends/nvshmem/module/hop_kernel.cuh"

int ferry_nvshmem_prepare_wide_hops() {
  return ferry::nvshmem::prepare_hop_kernel();
}

int ferry_nvshmem_launch_wide_hops(const void* arguments, const void* peers, const void* launch) {
  using namespace ferry::nvshmem;
  return launch_hop_kernel(*static_cast<const ferry::cuda::HopArguments*>(arguments),
                           *static_cast<const Peers*>(peers), *static_cast<const HopLaunch*>(launch));
}
