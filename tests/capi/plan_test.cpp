#include "ferry/plan.hpp"

#include <cstring>

#include "capi/pair.hpp"
#include "capi/same.hpp"

namespace ferry::capi_test {
namespace {

TEST(PlanQueries, AgreeWithTheAccessors) {
  run_threads(3, [&](ferry_rank* rank) {
    const ferry_config config = small_config();
    Pair pair(rank, config);
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    const Plan plan = Plan::over(pair.rows.plan.storage, pair.rows.plan.bytes);
    auto info = sized<ferry_plan_info>();
    ASSERT_EQ(ferry_plan_query(&pair.rows.plan, &info), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(info.rank, ferry_rank_index(rank));
    EXPECT_EQ(info.ranks, 3);
    EXPECT_EQ(info.experts, config.experts);
    EXPECT_EQ(info.top_k, config.top_k);
    EXPECT_EQ(info.tokens, pair.in.count);
    EXPECT_EQ(info.placement_version, plan.placement_version());
    EXPECT_EQ(info.total, *pair.rows.total);
    EXPECT_EQ(info.dropped, 0);
    expect_same_array(info.counts, plan.counts().data(), 3 * config.experts, "counts");
    expect_same_array(info.tokens_between, plan.tokens_between().data(), 9, "tokens_between");
    expect_same_array(info.sources, pair.rows.source, info.total, "sources");

    for (int route = 0; route < pair.in.count * config.top_k; ++route) {
      const int token = route / config.top_k, slot = route % config.top_k;
      std::int32_t destination = -9;
      std::int64_t row = -9;
      ASSERT_EQ(ferry_plan_route(&pair.rows.plan, token, slot, &destination, &row), FERRY_OK);
      EXPECT_EQ(destination, plan.destination(token, slot));
      EXPECT_EQ(row, plan.row(token, slot));
      EXPECT_EQ(destination < 0, pair.in.ids[static_cast<std::size_t>(route)] < 0);
    }
  });
}

TEST(PlanQueries, RefuseInvalidPlansAndArguments) {
  run_threads(1, [&](ferry_rank* rank) {
    Pair pair(rank, small_config());
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    const ferry_plan plan = pair.rows.plan;
    auto info = sized<ferry_plan_info>();
    ferry_plan empty{nullptr, 0, 0}, cut{plan.storage, plan.bytes - 16, 0};
    ferry_plan shifted{static_cast<char*>(plan.storage) + 4, plan.bytes, 0};
    EXPECT_EQ(ferry_plan_query(nullptr, &info), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("ferry_plan is NULL"));
    EXPECT_EQ(ferry_plan_query(&empty, &info), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("plan: empty"));
    EXPECT_EQ(ferry_plan_query(&shifted, &info), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("multiple of 16"));
    EXPECT_EQ(ferry_plan_query(&cut, &info), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains(std::to_string(plan.bytes)));
    cut.bytes = 8;
    EXPECT_EQ(ferry_plan_query(&cut, &info), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("8 bytes"));

    std::int32_t destination = 0;
    std::int64_t row = 0;
    for (const auto& [token, slot] : {std::pair(-1, 0), {pair.in.count, 0}, {0, -1}, {0, 3}}) {
      EXPECT_EQ(ferry_plan_route(&plan, token, slot, &destination, &row), FERRY_USAGE);
    }
    contract::GuardedBuffer storage(static_cast<std::int64_t>(plan.bytes));
    ferry_plan copy{};
    EXPECT_EQ(ferry_plan_copy(&plan, storage.data(), plan.bytes - 1, &copy), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains(std::to_string(plan.bytes)));
    EXPECT_EQ(ferry_plan_copy(&plan, nullptr, plan.bytes, &copy), FERRY_USAGE);
    EXPECT_EQ(copy.storage, nullptr);
    ASSERT_EQ(ferry_plan_copy(&plan, storage.data(), plan.bytes, &copy), FERRY_OK);
    EXPECT_EQ(copy.storage, storage.data());
    EXPECT_EQ(copy.bytes, plan.bytes);
    storage.require_guards("copy");

    storage.data()[20] ^= std::byte{1};
    EXPECT_EQ(ferry_plan_query(&copy, &info), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("damaged"));
  });
}

}  // namespace
}  // namespace ferry::capi_test
