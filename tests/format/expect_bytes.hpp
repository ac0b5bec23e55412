// Compares the bytes that a codec wrote with those of the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "format/support.hpp"

namespace ferry::test {

inline void expect_bytes(const Memory& got, const std::vector<std::uint8_t>& expected) {
  ASSERT_EQ(got.bytes(), static_cast<std::int64_t>(expected.size()));
  for (std::size_t at = 0; at < expected.size(); ++at)
    ASSERT_EQ(std::to_integer<int>(got.data()[at]), expected[at]) << "byte " << at;
}

}  // namespace ferry::test
