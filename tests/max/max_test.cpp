// MAX's call shapes with the numbers written out. tests/contract/max_test.cpp has random cases on every
// backend.
#include "ferry/max.hpp"

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "refusal.hpp"

namespace ferry::test {
namespace {

using Offsets = std::vector<std::uint32_t>;
using Numbers = std::vector<std::int32_t>;

template <class T>
std::vector<T> copied(std::span<const T> values) {
  return {values.begin(), values.end()};
}

void expect_index(const Numbers& counts, int alignment, const Offsets& row_offsets,
                  const Numbers& expert_ids) {
  const max::GroupIndex index = max::group_index(counts, alignment);
  EXPECT_EQ(index.row_offsets, row_offsets);
  EXPECT_EQ(index.expert_ids, expert_ids);
  EXPECT_EQ(index.number(), static_cast<int>(expert_ids.size()));
}

TEST(Max, GroupsWithoutRowsAreLeftOut) {
  expect_index({2, 0, 3}, 1, {0, 2, 5}, {0, 2});
  expect_index({0, 0, 1, 0}, 1, {0, 1}, {2});
  expect_index({4, 1}, 1, {0, 4, 5}, {0, 1});
  expect_index({0, 0}, 1, {0}, {});
  expect_index({}, 1, {0}, {});
  expect_index({3, 0, 4, 1}, 4, {0, 4, 8, 12}, {0, 2, 3});
}

std::string refusal(const Numbers& counts, int alignment) {
  return test::refusal([&] { max::group_index(counts, alignment); });
}

TEST(Max, WrongCountsAreRefused) {
  EXPECT_EQ(refusal({1, -2}, 1), "counts[1] = -2, must be 0 or more");
  EXPECT_EQ(refusal({1}, 0), "alignment = 0, must be 1 or more");
  EXPECT_EQ(refusal({2147483647, 1}, 1),
            "counts[0] to counts[1] add up to 2147483648 rows, must be at most 2147483647");
}

// A combine is named by its call number, so ranks that have made different calls go on together.
TEST(Max, RanksThatMadeDifferentCallsGoOn) {
  Group::threads(2).run([](const Rank& rank) {
    max::Exchange exchange(rank, {.experts = 2, .top_k = 1, .hidden = 8, .max_tokens = 2});
    const Numbers ids = {0, 1};
    const std::vector<std::uint16_t> tokens(16, 0x3F80);
    std::vector<std::uint16_t> result(16);
    const auto combine = [&](const max::DispatchResult& received) {
      exchange.ep_fused_combine({{.data = tokens.data()}, received},
                                {.output_tokens = {.data = result.data()}});
    };
    const max::DispatchResult received =
        exchange.ep_fused_dispatch(Tokens::rows(tokens.data(), 2), ids.data());
    if (rank.index() == 0) {
      EXPECT_THROW(combine(received), UsageError);
    } else {
      EXPECT_THROW(exchange.ep_fused_dispatch(Tokens::rows(tokens.data(), 2), ids.data()), UsageError);
    }
    combine(received);
    EXPECT_EQ(result, tokens);
  });
}

TEST(Max, AnIdOutOfRangeIsReportedAndItsResultIsThere) {
  Group::threads(2).run([](const Rank& rank) {
    max::Exchange exchange(rank, {.experts = 2, .top_k = 1, .hidden = 8, .max_tokens = 2});
    const bool first = rank.index() == 0;
    const Numbers ids = {1, first ? 7 : 0};
    const std::vector<std::uint16_t> tokens(16, 0x3F80);
    max::DispatchResult received;
    if (first) {
      EXPECT_THROW(exchange.ep_fused_dispatch(Tokens::rows(tokens.data(), 2), ids.data()), BadIdError);
      received = exchange.last_dispatch_result();
    } else {
      received = exchange.ep_fused_dispatch(Tokens::rows(tokens.data(), 2), ids.data());
    }
    EXPECT_EQ(copied(received.src_info), first ? Numbers({1, 0}) : Numbers({0, 0, 0, 0}));
    std::vector<std::uint16_t> result(16, 1), expected = tokens;
    if (first) std::fill(expected.begin() + 8, expected.end(), std::uint16_t{0});
    exchange.ep_fused_combine({{.data = received.output_tokens}, received},
                              {.output_tokens = {.data = result.data()}});
    EXPECT_EQ(result, expected);
  });
}

}  // namespace
}  // namespace ferry::test
