// What other processes have stored in a group's shared memory may be damaged: no number of it is used as an
// index, and no text is read past its end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>

#include "group/control_block.hpp"
#include "seed.hpp"

namespace ferry::test {
namespace {

constexpr int kRanks = 3;

void expect_bounded(const ErrorRecord& record) {
  for (const int rank : {record.wait.rank, record.wait.peer, record.wait.via}) {
    EXPECT_GE(rank, -1);
    EXPECT_LT(rank, kRanks);
  }
  EXPECT_LE(record.message().size(), sizeof record.text);
}

TEST(DamagedMemory, IsBoundedByTheControlBlock) {
  std::mt19937_64 random(seed());
  for (int step = 0; step < 200; ++step) {
    const auto bytes = static_cast<std::size_t>(ControlBlock::bytes(kRanks));
    Mapping memory = Mapping::anonymous_shared(static_cast<std::int64_t>(bytes));
    std::byte* const begin = memory.data();
    const ControlBlock control(std::move(memory), kRanks);
    std::generate_n(begin, bytes, [&] { return static_cast<std::byte>(random() % (1 + step % 256)); });
    const std::uint32_t numbers[] = {1, kRanks, kRanks + 1, kRanks + 2, 1u << 20, ~0u};
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t number = numbers[random() % std::size(numbers)];
      std::memcpy(begin + 4 * i, &number, sizeof number);
    }
    ASSERT_TRUE(control.failed());
    expect_bounded(control.failure());
    const int first = control.first_failed_rank();
    ASSERT_GE(first, -1);
    ASSERT_LT(first, kRanks);
    if (first >= 0) expect_bounded(control.error_of(first));
    EXPECT_ANY_THROW(control.throw_failure({}));
  }
}

}  // namespace
}  // namespace ferry::test
