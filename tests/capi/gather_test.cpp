// all_gather_v and reduce_scatter_v through the C interface.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "capi/run.hpp"

namespace ferry::capi_test {
namespace {

const std::vector<std::int64_t> kCounts = {3, 0, 5, 1};
constexpr std::int64_t kTotal = 9, kRows = 11, kColumns = 8;  // two rows more than arrive

ferry_config gather_config() {
  ferry_config config = small_config();
  config.hidden = kColumns;
  return config;
}

// The rows of a rank: 100 * rank + row, in every column.
std::vector<std::int32_t> rows_of(int rank, std::int64_t rows) {
  std::vector<std::int32_t> made;
  for (std::int64_t row = 0; row < rows; ++row)
    made.insert(made.end(), kColumns, static_cast<std::int32_t>(100 * rank + row));
  return made;
}

ferry_all_gather_v_args gather_args(const std::vector<std::int32_t>& rows, std::vector<std::int32_t>* out) {
  auto args = sized<ferry_all_gather_v_args>();
  args.rows = rows.empty() ? nullptr : rows.data();
  args.count = static_cast<std::int64_t>(rows.size()) / kColumns;
  args.row_bytes = kColumns * 4;
  args.gathered = out->data();
  args.capacity = static_cast<std::int64_t>(out->size()) / kColumns;
  return args;
}

TEST(Gather, ConcatenatesTheRowsOfAllRanks) {
  run_threads(4, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, gather_config());
    const int me = ferry_rank_index(rank);
    const auto mine = rows_of(me, kCounts[static_cast<std::size_t>(me)]);
    std::vector<std::int32_t> got(kRows * kColumns, -7), expected;
    const auto args = gather_args(mine, &got);
    ASSERT_EQ(ferry_all_gather_v(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    for (int r = 0; r < 4; ++r) {
      const auto rows = rows_of(r, kCounts[static_cast<std::size_t>(r)]);
      expected.insert(expected.end(), rows.begin(), rows.end());
    }
    expected.resize(kRows * kColumns, -7);
    EXPECT_EQ(got, expected);
  });
}

TEST(Gather, AddsTheRowsOfAllRanks) {
  run_threads(4, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, gather_config());
    const int me = ferry_rank_index(rank);
    std::vector<float> rows;
    for (std::int64_t row = 0; row < kTotal; ++row)
      rows.insert(rows.end(), kColumns, static_cast<float>(1000 * me + row));
    const std::int64_t count = kCounts[static_cast<std::size_t>(me)];
    std::int64_t row = 0;
    for (int r = 0; r < me; ++r) row += kCounts[static_cast<std::size_t>(r)];
    std::vector<float> got(static_cast<std::size_t>(count * kColumns) + 1, -7), expected;
    auto args = sized<ferry_reduce_scatter_v_args>();
    args.rows = rows.data();
    args.total = kTotal;
    args.sums = got.data();
    args.count = count;
    args.type = FERRY_FP32;
    ASSERT_EQ(ferry_reduce_scatter_v(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    for (std::int64_t i = 0; i < count; ++i)
      expected.insert(expected.end(), kColumns, static_cast<float>(6000 + 4 * (row + i)));
    expected.push_back(-7);  // not written
    EXPECT_EQ(got, expected);
  });
}

TEST(Gather, BadArgumentsEndTheCallOfEveryRankAndWriteNothing) {
  run_threads(4, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, gather_config());
    const int me = ferry_rank_index(rank);
    const auto mine = rows_of(me, 2);
    std::vector<std::int32_t> got((me == 2 ? 7 : 8) * kColumns, -7);
    const auto untouched = got;
    const auto small = gather_args(mine, &got);
    EXPECT_EQ(ferry_all_gather_v(exchange.get(), &small), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("room for 7 rows on rank 2, but all ranks together have 8"));
    EXPECT_EQ(got, untouched);

    const std::vector<float> rows(8 * kColumns);
    std::vector<float> sums(2 * kColumns, -7);
    auto scatter = sized<ferry_reduce_scatter_v_args>();
    scatter.rows = rows.data();
    scatter.total = 8;
    scatter.sums = sums.data();
    scatter.count = 2;
    scatter.type = me == 1 ? 3 : FERRY_FP32;
    EXPECT_EQ(ferry_reduce_scatter_v(exchange.get(), &scatter), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("type = 3, must be FERRY_BF16 (0), FERRY_FP16 (1) or FERRY_FP32 (2)"));
    EXPECT_TRUE(me == 1 || last_error_contains("rank 1 refused reduce_scatter_v"));
    EXPECT_EQ(sums, std::vector<float>(2 * kColumns, -7));

    if (me == 3) {
      EXPECT_EQ(ferry_refuse(exchange.get(), FERRY_ALL_GATHER_V, 0, "not now", nullptr), FERRY_OK);
    } else {
      EXPECT_EQ(ferry_all_gather_v(exchange.get(), &small), FERRY_USAGE);
      EXPECT_TRUE(last_error_contains("not now"));
    }
    got.assign(8 * kColumns, -7);
    const auto enough = gather_args(mine, &got);
    EXPECT_EQ(ferry_all_gather_v(exchange.get(), &enough), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(got[7 * kColumns], 301);
  });
}

TEST(GatheredInput, SendsEveryTokenToEveryRank) {
  run_threads(3, [](ferry_rank* rank) {
    ferry_config config = small_config();
    config.transfer = FERRY_TRANSFER_GATHER;
    const ExchangeHandle exchange = make_exchange(rank, config);
    auto taken = sized<ferry_config>();
    ASSERT_EQ(ferry_exchange_config(exchange.get(), &taken), FERRY_OK);
    EXPECT_EQ(taken.transfer, FERRY_TRANSFER_GATHER);
    const std::vector<std::uint16_t> values(2 * 256, 0x3F80);
    const std::vector<std::int32_t> ids = {0, 3, -1, -1, -1, -1};  // experts of rank 0 only
    auto args = sized<ferry_dispatch_args>();
    args.tokens.parts[0] = values.data();
    args.tokens.count = 2;
    args.ids = ids.data();
    ASSERT_EQ(ferry_dispatch(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    auto wire = sized<ferry_wire_counts>();
    ASSERT_EQ(ferry_get_wire_counts(exchange.get(), &wire), FERRY_OK);
    EXPECT_EQ(wire.dispatch_messages, 4);

    config.transfer = 2;
    ferry_exchange* made = nullptr;
    EXPECT_EQ(ferry_exchange_create(rank, &config, &made), FERRY_USAGE);
    EXPECT_TRUE(
        last_error_contains("ferry_config.transfer = 2, must be FERRY_TRANSFER_ROUTED (0) or "
                            "FERRY_TRANSFER_GATHER (1)"));
  });
}

}  // namespace
}  // namespace ferry::capi_test
