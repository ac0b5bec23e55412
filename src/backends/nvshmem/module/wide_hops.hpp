// The launch for groups of more than kNarrowRanks ranks, as module.cu calls it.
#pragma once

#include "backends/nvshmem/module/module.hpp"

namespace ferry::nvshmem {

int prepare_wide_hops();
int launch_wide_hops(const cuda::HopArguments& arguments, const Peers& peers, const HopLaunch& launch);

}  // namespace ferry::nvshmem
