// The launch between the phases of a call over NVSHMEM, for groups of more than kNarrowRanks ranks.
#define FERRY_WIDE_KERNELS
#include "backends/nvshmem/module/hop_kernel.cuh"
