// Division by a number that the host knows in advance, as a multiplication and a shift.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"

namespace ferry {

// Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994, section 4: with shift
// = ceil(log2 d) and magic = floor(2^32 (2^shift - d) / d) + 1, floor(n / d) is (floor(n magic / 2^32) + n)
// >> shift for every n below 2^31.
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

}  // namespace ferry
