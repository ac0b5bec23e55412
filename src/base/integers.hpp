// Integers in host and device code: sets of ranks, division by a known number, terms of hashes.
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

// Division by a number that the host knows in advance, as a multiplication and a shift: Granlund and
// Montgomery, "Division by Invariant Integers using Multiplication", 1994, section 4.
// With shift = ceil(log2 d) and magic = floor(2^32 (2^shift - d) / d) + 1, floor(n / d) is
// (floor(n magic / 2^32) + n) >> shift for every n below 2^31.
struct Divisor {
  std::int32_t divisor = 1;
  std::uint32_t magic = 1;
  std::int32_t shift = 0;

  // 1 <= divisor <= 2^30.
  static constexpr Divisor of(std::int32_t divisor) {
    Divisor result{divisor, 0, 0};
    while (std::int64_t{1} << result.shift < divisor) ++result.shift;
    const std::uint64_t more = (std::uint64_t{1} << result.shift) - static_cast<std::uint64_t>(divisor);
    result.magic = static_cast<std::uint32_t>((more << 32) / static_cast<std::uint64_t>(divisor) + 1);
    return result;
  }
  // 0 <= n < 2^31.
  FERRY_HD constexpr std::int32_t quotient(std::int32_t n) const {
    const auto of = static_cast<std::uint32_t>(n);
    const auto high = static_cast<std::uint32_t>(std::uint64_t{of} * magic >> 32);
    return static_cast<std::int32_t>((high + of) >> shift);
  }
  // The smallest multiple of the divisor that is at least n; it must be below 2^31.
  FERRY_HD constexpr std::int32_t round_up(std::int32_t n) const {
    return quotient(n + divisor - 1) * divisor;
  }
};

// For hashes that are sums, whose threads may add in any order. Mixes two numbers so that every bit of either
// changes the result (the finaliser of SplitMix64).
FERRY_HD std::uint64_t mixed_bits(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = (a + 1) * 0x9e3779b97f4a7c15 + b;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

}  // namespace ferry
