// The launch for groups of more than kNarrowRanks ranks, as module.cu calls it. Its code has a namespace of
// its own (wide_hops.cu), so types of Ferry are passed by address.
#pragma once

extern "C" {
int ferry_nvshmem_prepare_wide_hops();
// `arguments`: cuda::HopArguments; `peers`: Peers; `launch`: HopLaunch.
int ferry_nvshmem_launch_wide_hops(const void* arguments, const void* peers, const void* launch);
}
