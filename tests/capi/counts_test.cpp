// The caller's memory for counts and totals, counts without rows, refusals, and formats by name.
#include <numeric>
#include <vector>

#include "capi/run.hpp"

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

  ferry_dispatch_counts_args counts_args(ferry_dispatch_counts_result* result) const {
    auto args = sized<ferry_dispatch_counts_args>();
    args.ids = ids.data();
    args.tokens = kTokens;
    args.result = result;
    return args;
  }
};

TEST(Counts, ComeWithoutRows) {
  run_threads(3, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    const Routed routed;
    auto counts = sized<ferry_dispatch_counts_result>();
    const auto args = routed.counts_args(&counts);
    ASSERT_EQ(ferry_dispatch_counts(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    const std::vector<std::vector<std::int32_t>> expected = {{12, 0, 0, 12}, {0, 0, 0}, {0, 0, 12}};
    const auto& routes = expected[static_cast<std::size_t>(ferry_rank_index(rank))];
    EXPECT_EQ(std::vector(counts.routes, counts.routes + counts.local_experts), routes);
    EXPECT_EQ(std::vector(counts.tokens, counts.tokens + counts.ranks),
              std::vector<std::int32_t>(3, Routed::kTokens));
    EXPECT_EQ(counts.total, std::accumulate(routes.begin(), routes.end(), 0));
  });
}

TEST(Counts, GoToTheCallersMemory) {
  run_threads(3, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    const Routed routed;
    auto result = sized<ferry_dispatch_result>();
    std::vector<std::int32_t> counts(4, -7), offsets(5, -7), sums(4, 100);
    auto args = routed.args();
    args.result = &result;
    args.more_memory = {.counts = counts.data(),
                        .row_offsets = offsets.data(),
                        .dots = nullptr,
                        .count_sums = sums.data(),
                        .rows = 0};
    ASSERT_EQ(ferry_dispatch(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(result.counts, counts.data());
    EXPECT_EQ(result.row_offsets, offsets.data());
    EXPECT_EQ(result.total, offsets.data() + result.groups);
    if (ferry_rank_index(rank) != 0) return;
    EXPECT_EQ(counts, (std::vector<std::int32_t>{12, 0, 0, 12}));
    EXPECT_EQ(offsets, (std::vector<std::int32_t>{0, 12, 12, 12, 24}));
    EXPECT_EQ(sums, (std::vector<std::int32_t>{112, 100, 100, 112}));
  });
}

TEST(Counts, InDeviceMemoryNeedADevice) {
  run_threads(1, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    const std::int32_t number = 1;
    auto dispatch = Routed().args();
    dispatch.device_count = &number;
    EXPECT_EQ(ferry_dispatch(exchange.get(), &dispatch), FERRY_UNSUPPORTED);
    const ferry_step_metadata* made = nullptr;
    auto metadata = sized<ferry_metadata_args>();
    metadata.metadata = &made;
    metadata.device_count = &number;
    EXPECT_EQ(ferry_metadata(exchange.get(), &metadata), FERRY_UNSUPPORTED);
    EXPECT_EQ(ferry_synchronize(exchange.get(), 0, nullptr), FERRY_OK)
        << "host backends have nothing to wait for";
    EXPECT_EQ(ferry_synchronize(exchange.get(), 1, nullptr), FERRY_USAGE);
  });
}

TEST(Refusals, OfARankEndThePeersCall) {
  run_threads(3, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    const Routed routed;
    const auto args = routed.args();
    if (ferry_rank_index(rank) == 1) {
      EXPECT_EQ(ferry_refuse(exchange.get(), 99, 0, "no", nullptr), FERRY_USAGE);
      EXPECT_EQ(ferry_refuse(exchange.get(), FERRY_DISPATCH, 0, "the router is not ready", nullptr),
                FERRY_OK);
    } else {
      EXPECT_EQ(ferry_dispatch(exchange.get(), &args), FERRY_USAGE);
      EXPECT_TRUE(last_error_contains("rank 1 refused"));
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
    EXPECT_EQ(ferry_format_name(&format, read, std::string(name).size()), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("bytes are needed"));
  }
  ferry_format format{};
  EXPECT_EQ(ferry_parse_format("fp9", &format), FERRY_USAGE);
  EXPECT_TRUE(last_error_contains("fp9"));
}

}  // namespace
}  // namespace ferry::capi_test
