// How many ranks the kernels of a translation unit serve.
//
// In the kernels of most calls a rank is a thread of a warp, or a bit of a word. Such narrow kernels serve
// groups of up to kNarrowRanks ranks. Wide kernels serve groups of any size: they come from the same sources,
// in translation units that define FERRY_WIDE_KERNELS before they include anything, and loop over ranks where
// narrow ones have a thread for each. Operations whose time does not matter have wide kernels only.
//
// A device header (.cuh) that includes this one, if only by others, has what it defines in the inline
// namespace FERRY_WIDTH, so types and functions of narrow and wide kernels have different names. Everything
// outside is the same for both.
#pragma once

#include "base/integers.hpp"

#ifdef FERRY_WIDE_KERNELS
#define FERRY_WIDTH wide
#else
#define FERRY_WIDTH narrow
#endif

namespace ferry::cuda {

inline constexpr int kNarrowRanks = 32;

inline namespace FERRY_WIDTH {
#ifdef FERRY_WIDE_KERNELS
inline constexpr bool kWide = true;
inline constexpr int kKernelRanks = kMaxDeviceRanks;
#else
inline constexpr bool kWide = false;
inline constexpr int kKernelRanks = kNarrowRanks;
#endif
}  // namespace FERRY_WIDTH

// Whether the calls of a group take wide kernels. Host code.
#if FERRY_TEST_HOOKS
bool takes_wide_kernels(int ranks);  // with FERRY_WIDE=1 groups of any size do
#else
inline bool takes_wide_kernels(int ranks) {
  return ranks > kNarrowRanks;
}
#endif

}  // namespace ferry::cuda
