// Sets of ranks as bits, for host and device code.
#pragma once

#include <bit>
#include <cstdint>

#include "base/host_device.hpp"

namespace ferry {

inline constexpr int kMaxDeviceRanks = 256;  // ranks of a group whose rows are moved by kernels

// A set of the ranks 0 to kRanks - 1. Loops over words are unrolled, so sets of up to 32 ranks cost what a
// 32-bit mask costs. Starts empty where it is value-initialised; no constructor, so that it can lie in shared
// memory.
template <int kRanks>
struct RankBits {
  static constexpr int kWords = (kRanks + 31) / 32;

  std::uint32_t word[kWords];

  FERRY_HD constexpr void clear() {
    for (std::uint32_t& each : word) each = 0;
  }
  FERRY_HD constexpr bool has(int rank) const {
    if constexpr (kWords == 1) return (word[0] >> rank & 1) != 0;
    return (word[rank / 32] >> rank % 32 & 1) != 0;
  }
  FERRY_HD constexpr void add(int rank) {
    if constexpr (kWords == 1) {
      word[0] |= std::uint32_t{1} << rank;
    } else {
      word[rank / 32] |= std::uint32_t{1} << rank % 32;
    }
  }
  FERRY_HD constexpr bool any() const {
    std::uint32_t all = 0;
    for (const std::uint32_t each : word) all |= each;
    return all != 0;
  }
  FERRY_HD constexpr int count() const {
    int ranks = 0;
    for (const std::uint32_t each : word) ranks += bits_of(each);
    return ranks;
  }
  // Members below `rank`.
  FERRY_HD constexpr int count_below(int rank) const {
    const std::uint32_t below = (std::uint32_t{1} << rank % 32) - 1;
    int ranks = 0;
    for (int w = 0; w < kWords; ++w)
      ranks += bits_of(word[w] & (w < rank / 32 ? ~std::uint32_t{0} : w == rank / 32 ? below : 0));
    return ranks;
  }
  FERRY_HD constexpr RankBits& operator|=(const RankBits& other) {
    for (int w = 0; w < kWords; ++w) word[w] |= other.word[w];
    return *this;
  }
  friend constexpr bool operator==(const RankBits&, const RankBits&) = default;

 private:
  FERRY_HD static constexpr int bits_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __popc(static_cast<int>(bits));
#else
    return std::popcount(bits);
#endif
  }
};

}  // namespace ferry
