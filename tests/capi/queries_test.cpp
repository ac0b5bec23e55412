// Queries of plans, counts in device memory, refusals, and formats by name.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "capi/run.hpp"
#include "ferry/plan.hpp"
#include "harness/guarded_buffer.hpp"

namespace ferry::capi_test {
namespace {

// Tokens of this rank to experts 0, 3 and 9 of 10: ranks 0, 0 and 2.
struct Routed {
  static constexpr int kTokens = 4;
  std::vector<std::uint16_t> values = std::vector<std::uint16_t>(kTokens * 256, 0x3F80);
  std::vector<std::int32_t> ids;

  Routed() {
    for (int token = 0; token < kTokens; ++token) ids.insert(ids.end(), {0, 3, 9});
  }

  ferry_dispatch_args args() const {
    auto args = sized<ferry_dispatch_args>();
    args.tokens.parts[0] = values.data();
    args.tokens.count = kTokens;
    args.ids = ids.data();
    return args;
  }
};

template <class T, class U>
void expect_equal(const T* found, const U* expected, std::int64_t count) {
  static_assert(sizeof(T) == sizeof(U));
  EXPECT_EQ(std::memcmp(found, expected, static_cast<std::size_t>(count) * sizeof(T)), 0);
}

TEST(PlanQueries, AgreeWithTheAccessors) {
  run_threads(3, [&](ferry_rank* rank) {
    const ferry_config config = small_config();
    const ExchangeHandle exchange = make_exchange(rank, config);
    Routed routed;
    routed.ids[4] = -1;
    auto rows = sized<ferry_dispatch_result>();
    auto args = routed.args();
    args.result = &rows;
    ASSERT_EQ(ferry_dispatch(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    const Plan plan = Plan::over(rows.plan.storage, rows.plan.bytes);
    auto info = sized<ferry_plan_info>();
    ASSERT_EQ(ferry_plan_query(&rows.plan, &info), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(info.rank, ferry_rank_index(rank));
    EXPECT_EQ(info.ranks, 3);
    EXPECT_EQ(info.experts, config.experts);
    EXPECT_EQ(info.top_k, config.top_k);
    EXPECT_EQ(info.tokens, Routed::kTokens);
    EXPECT_EQ(info.placement_version, plan.placement_version());
    EXPECT_EQ(info.total, *rows.total);
    EXPECT_EQ(info.dropped, 0);
    expect_equal(info.counts, plan.counts().data(), 3 * config.experts);
    expect_equal(info.tokens_between, plan.tokens_between().data(), 9);
    expect_equal(info.sources, rows.source, info.total);

    for (int route = 0; route < Routed::kTokens * config.top_k; ++route) {
      const int token = route / config.top_k, slot = route % config.top_k;
      std::int32_t destination = -9;
      std::int64_t row = -9;
      ASSERT_EQ(ferry_plan_route(&rows.plan, token, slot, &destination, &row), FERRY_OK);
      EXPECT_EQ(destination, plan.destination(token, slot));
      EXPECT_EQ(row, plan.row(token, slot));
      EXPECT_EQ(destination < 0, routed.ids[static_cast<std::size_t>(route)] < 0);
    }
  });
}

TEST(PlanQueries, RefuseInvalidPlansAndArguments) {
  run_threads(1, [&](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    const Routed routed;
    auto rows = sized<ferry_dispatch_result>();
    auto args = routed.args();
    args.result = &rows;
    ASSERT_EQ(ferry_dispatch(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    const ferry_plan plan = rows.plan;
    auto info = sized<ferry_plan_info>();
    ferry_plan empty{nullptr, 0, 0, {}}, cut{plan.storage, plan.bytes - 16, 0, {}};
    ferry_plan shifted{static_cast<char*>(plan.storage) + 4, plan.bytes, 0, {}};
    EXPECT_TRUE(is_refused(ferry_plan_query(nullptr, &info), "ferry_plan is NULL"));
    EXPECT_TRUE(is_refused(ferry_plan_query(&empty, &info), "plan: empty"));
    EXPECT_TRUE(is_refused(ferry_plan_query(&shifted, &info), "multiple of 16"));
    EXPECT_TRUE(is_refused(ferry_plan_query(&cut, &info), std::to_string(plan.bytes)));
    cut.bytes = 8;
    EXPECT_TRUE(is_refused(ferry_plan_query(&cut, &info), "8 bytes"));

    std::int32_t destination = 0;
    std::int64_t row = 0;
    for (const auto& [token, slot] : {std::pair(-1, 0), {Routed::kTokens, 0}, {0, -1}, {0, 3}}) {
      EXPECT_EQ(ferry_plan_route(&plan, token, slot, &destination, &row), FERRY_USAGE);
    }
    contract::GuardedBuffer storage(static_cast<std::int64_t>(plan.bytes));
    ferry_plan copy{};
    EXPECT_TRUE(is_refused(ferry_plan_copy(&plan, storage.data(), plan.bytes - 1, &copy),
                           std::to_string(plan.bytes)));
    EXPECT_EQ(ferry_plan_copy(&plan, nullptr, plan.bytes, &copy), FERRY_USAGE);
    EXPECT_EQ(copy.storage, nullptr);
    ASSERT_EQ(ferry_plan_copy(&plan, storage.data(), plan.bytes, &copy), FERRY_OK);
    EXPECT_EQ(copy.storage, storage.data());
    EXPECT_EQ(copy.bytes, plan.bytes);
    storage.require_guards("copy");

    storage.data()[20] ^= std::byte{1};
    EXPECT_TRUE(is_refused(ferry_plan_query(&copy, &info), "damaged"));
  });
}

TEST(Counts, InDeviceMemoryNeedADevice) {
  run_threads(1, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    const std::int32_t number = 1;
    auto dispatch = Routed().args();
    dispatch.tokens.device_count = &number;
    EXPECT_EQ(ferry_dispatch(exchange.get(), &dispatch), FERRY_UNSUPPORTED);
    const ferry_step_metadata* made = nullptr;
    auto metadata = sized<ferry_metadata_args>();
    metadata.metadata = &made;
    metadata.device_count = &number;
    EXPECT_EQ(ferry_metadata(exchange.get(), &metadata), FERRY_UNSUPPORTED);
    EXPECT_EQ(ferry_synchronize(exchange.get(), nullptr), FERRY_OK)
        << "host backends have nothing to wait for";
    const ferry_call_options second{.lane = 1, .sm_limit = 0, .stream = nullptr, .reserved = {}};
    EXPECT_EQ(ferry_synchronize(exchange.get(), &second), FERRY_USAGE);
  });
}

TEST(Refusals, OfARankEndThePeersCall) {
  run_threads(3, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    const Routed routed;
    const auto args = routed.args();
    if (ferry_rank_index(rank) == 1) {
      EXPECT_EQ(ferry_refuse(exchange.get(), 99, "no", nullptr), FERRY_USAGE);
      EXPECT_EQ(ferry_refuse(exchange.get(), FERRY_DISPATCH, "the router is not ready", nullptr), FERRY_OK);
    } else {
      EXPECT_TRUE(is_refused(ferry_dispatch(exchange.get(), &args), "rank 1 refused"));
      EXPECT_TRUE(last_error_contains("the router is not ready"));
    }
    EXPECT_EQ(ferry_dispatch(exchange.get(), &args), FERRY_OK) << ferry_last_error();
  });
}

TEST(Formats, AreReadAndWrittenByName) {
  for (const char* name : {"bf16", "fp16", "fp32", "fp8", "fp8-columns", "fp8-pow2-packed", "raw:1024+64"}) {
    ferry_format format{};
    ASSERT_EQ(ferry_parse_format(name, &format), FERRY_OK) << ferry_last_error();
    char read[32];
    ASSERT_EQ(ferry_format_name(&format, read, sizeof read), FERRY_OK) << ferry_last_error();
    EXPECT_STREQ(read, name);
    EXPECT_TRUE(is_refused(ferry_format_name(&format, read, std::string(name).size()), "bytes are needed"));
  }
  ferry_format format{};
  EXPECT_TRUE(is_refused(ferry_parse_format("fp9", &format), "fp9"));
}

}  // namespace
}  // namespace ferry::capi_test
