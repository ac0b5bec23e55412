// CallArrays against a map of bytes: random arrays with strides, a few of which are written.
#include "exchange/overlap.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "seed.hpp"

namespace ferry {
namespace {

struct Strided {
  std::int64_t at, rows, row_bytes, stride;
  bool written;

  bool holds(std::int64_t byte) const {
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t begin = at + row * stride;
      if (byte >= begin && byte < begin + row_bytes) return true;
    }
    return false;
  }
};

bool refused(const std::byte* memory, const Strided& a, const Strided& b) {
  CallArrays arrays;
  for (const Strided& each : {a, b}) {
    if (each.written) {
      arrays.write("written", memory + each.at, each.rows, each.row_bytes, each.stride);
    } else {
      arrays.read("read", memory + each.at, each.rows, each.row_bytes, each.stride);
    }
  }
  try {
    arrays.require_apart("call: ", 3);
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("on rank 3"), std::string::npos) << error.what();
    return true;
  }
  return false;
}

TEST(Overlap, IsThatOfTheBytes) {
  constexpr std::int64_t kBytes = 96;
  const std::vector<std::byte> memory(kBytes);
  std::mt19937_64 random(test::seed());
  const auto below = [&](std::int64_t end) { return static_cast<std::int64_t>(random() % end); };
  int apart_within = 0;
  for (int run = 0; run < 100'000; ++run) {
    Strided array[2];
    for (Strided& each : array) {
      const std::int64_t row_bytes = 1 + below(6);
      each = {below(40), below(5), row_bytes, row_bytes + below(7), below(3) > 0};
    }
    if (below(2) == 0) array[1].stride = std::max(array[0].stride, array[1].row_bytes);
    bool shared = false;
    for (std::int64_t byte = 0; byte < kBytes; ++byte) shared |= array[0].holds(byte) && array[1].holds(byte);
    const bool written = array[0].written || array[1].written;
    apart_within += !shared && array[0].rows > 1 && array[1].rows > 1 && array[0].at < array[1].at &&
                    array[1].at < array[0].at + array[0].stride;
    ASSERT_EQ(refused(memory.data(), array[0], array[1]), shared && written)
        << array[0].at << ' ' << array[0].rows << ' ' << array[0].row_bytes << ' ' << array[0].stride << ", "
        << array[1].at << ' ' << array[1].rows << ' ' << array[1].row_bytes << ' ' << array[1].stride;
  }
  EXPECT_GT(apart_within, 100);  // rows between each other's
}

TEST(Overlap, NullArraysShareNothing) {
  EXPECT_FALSE(refused(nullptr, {0, 1, 8, 8, true}, {0, 1, 8, 8, true}));
}

}  // namespace
}  // namespace ferry
