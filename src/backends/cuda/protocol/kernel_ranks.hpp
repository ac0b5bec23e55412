// How many ranks the kernels of a translation unit serve.
//
// In the kernels of most calls a rank is a thread of a warp, or a bit of a word. Such narrow kernels serve
// groups of up to kNarrowRanks ranks. Wide kernels serve groups of any size: they come from the same sources,
// in translation units that define FERRY_WIDE_KERNELS before they include anything, and loop over ranks where
// narrow ones have a thread for each. Operations whose time does not matter have wide kernels only.
//
// Device code is linked within a translation unit. Programs that compile it for the host keep narrow and wide
// code apart.
#pragma once

#include "layout/rank_bits.hpp"

namespace ferry::cuda {

inline constexpr int kNarrowRanks = 32;

#ifdef FERRY_WIDE_KERNELS
constexpr bool kWide = true;
constexpr int kKernelRanks = kMaxDeviceRanks;
#else
constexpr bool kWide = false;
constexpr int kKernelRanks = kNarrowRanks;
#endif

// Whether the calls of a group take wide kernels. Host code.
#if FERRY_TEST_HOOKS
bool takes_wide_kernels(int ranks);  // with FERRY_WIDE=1 groups of any size do
#else
inline bool takes_wide_kernels(int ranks) {
  return ranks > kNarrowRanks;
}
#endif

}  // namespace ferry::cuda
