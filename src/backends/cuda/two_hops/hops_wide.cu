// The launch between the phases of a call in two hops, for groups of more than kNarrowRanks ranks.
#define FERRY_WIDE_KERNELS
#include "backends/cuda/two_hops/pretended_hops.cuh"
