// The call shapes of MAX through the C interface: the bytes of the C++ interface, and what is refused.
#include "ferry/max.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "capi/run.hpp"
#include "seed.hpp"

namespace ferry::capi_test {
namespace {

using MaxHandle = std::unique_ptr<ferry_max_exchange, void (*)(ferry_max_exchange*)>;

ferry_config max_config() {
  ferry_config config = small_config();
  config.experts = 6;
  config.top_k = 2;
  config.hidden = 8;
  config.shared_experts = 1;
  return config;
}

MaxHandle make_max(const ferry_rank* rank, const ferry_config& config) {
  ferry_max_exchange* exchange = nullptr;
  EXPECT_EQ(ferry_max_exchange_create(rank, &config, &exchange), FERRY_OK) << ferry_last_error();
  return {exchange, ferry_max_exchange_destroy};
}

TEST(MaxInC, GroupsWithoutRowsAreLeftOut) {
  const std::int32_t counts[] = {2, 0, 3};
  std::uint32_t row_offsets[] = {9, 9, 9, 9};
  std::int32_t expert_ids[] = {9, 9, 9};
  int number = 0;
  ASSERT_EQ(ferry_max_group_index(counts, 3, 1, row_offsets, expert_ids, &number), FERRY_OK);
  EXPECT_EQ(number, 2);
  EXPECT_EQ(std::vector(row_offsets, row_offsets + 4), (std::vector<std::uint32_t>{0, 2, 5, 9}));
  EXPECT_EQ(std::vector(expert_ids, expert_ids + 3), (std::vector<std::int32_t>{0, 2, 9}));
  EXPECT_TRUE(is_refused(ferry_max_group_index(counts, 3, 0, row_offsets, expert_ids, &number),
                         "alignment = 0, must be 1 or more"));
  EXPECT_TRUE(
      is_refused(ferry_max_group_index(counts, 3, 1, nullptr, expert_ids, &number), "row_offsets is NULL"));
}

// Ranks 0 and 1 with three experts each.
struct Step {
  explicit Step(int rank)
      : ids(rank == 0 ? std::vector<std::int32_t>{3, 5, 5, 0} : std::vector<std::int32_t>{5, 3, -1, 1}) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(100 * rank) + i / 8;
    dispatch.input_tokens.parts[0] = values.data();
    dispatch.input_tokens.count = 2;
    dispatch.input_tokens.type = FERRY_FP32;
    dispatch.topk_ids = ids.data();
    dispatch.result = &received;
  }
  ferry_max_combine_args combine_args() {
    auto args = sized<ferry_max_combine_args>();
    args.input_tokens = {.data = const_cast<void*>(received.output_tokens),
                         .stride = 0,
                         .type = FERRY_FP32,
                         .rows = 0,
                         .reserved = {}};
    args.src_info = received.src_info;
    args.row_offsets = received.row_offsets;
    args.counts = received.counts;
    args.number = static_cast<std::int32_t>(received.expert_usage_stats[1]);
    args.output_tokens = {.data = result.data(), .stride = 0, .type = FERRY_FP32, .rows = 0, .reserved = {}};
    args.router_weights = weights.data();
    return args;
  }

  std::vector<std::int32_t> ids;
  std::vector<float> values = std::vector<float>(16), result = std::vector<float>(16),
                     weights = {0.5f, 0.25f, 2, 1};
  ferry_max_dispatch_result received = sized<ferry_max_dispatch_result>();
  ferry_max_dispatch_args dispatch = sized<ferry_max_dispatch_args>();
};

ferry_config fp32_config() {
  ferry_config config = max_config();
  config.format.kind = FERRY_FORMAT_FP32;
  config.combine_type = FERRY_FP32;
  return config;
}

// The sum if every expert, the shared one too, returns its input.
std::vector<float> expected_result(const Step& step, int rank) {
  const float weight[] = {0.75f, rank == 0 ? 3.0f : 1.0f};
  std::vector<float> expected;
  for (std::size_t i = 0; i < step.values.size(); ++i)
    expected.push_back(step.values[i] * weight[i / 8] + step.values[i]);
  return expected;
}

TEST(MaxInC, DispatchAndCombineInBothForms) {
  run_threads(2, [](ferry_rank* rank) {
    const MaxHandle exchange = make_max(rank, fp32_config());
    const int me = ferry_rank_index(rank);
    Step step(me);
    ASSERT_EQ(ferry_max_ep_fused_dispatch(exchange.get(), &step.dispatch), FERRY_OK) << ferry_last_error();
    const ferry_max_dispatch_result& received = step.received;
    EXPECT_EQ(received.groups, 4);
    EXPECT_EQ(received.ranks, 2);
    const std::vector<std::int32_t> info(
        received.src_info, received.src_info + 2 * received.row_offsets[received.expert_usage_stats[1]]);
    EXPECT_EQ(info, me == 0 ? (std::vector<std::int32_t>{0, 2, 1, 2, 1, 1, 1, 1})
                            : (std::vector<std::int32_t>{0, 2, 1, 2, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0}));
    auto args = step.combine_args();
    ASSERT_EQ(ferry_max_ep_fused_combine(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(step.result, expected_result(step, me));
    const ferry_epilogue epilogue{
        .size = sizeof(ferry_epilogue), .residual = step.values.data(), .stride = 0, .scale = 2};
    args.epilogue = &epilogue;
    ASSERT_EQ(ferry_max_ep_fused_combine(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    std::vector<float> scaled = expected_result(step, me);
    for (std::size_t i = 0; i < scaled.size(); ++i) scaled[i] = 2 * scaled[i] + step.values[i];
    EXPECT_EQ(step.result, scaled);
    auto added = sized<ferry_epilogue>();  // with the scale of a zeroed struct, which is 1
    added.residual = step.values.data();
    args.epilogue = &added;
    ASSERT_EQ(ferry_max_ep_fused_combine(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    scaled = expected_result(step, me);
    for (std::size_t i = 0; i < scaled.size(); ++i) scaled[i] += step.values[i];
    EXPECT_EQ(step.result, scaled);
    added.size = 3;
    EXPECT_EQ(ferry_max_ep_fused_combine(exchange.get(), &args), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("ferry_epilogue: size = 3"));

    Step again(me);
    ASSERT_EQ(ferry_max_ep_dispatch_async(exchange.get(), &again.dispatch), FERRY_OK);
    ASSERT_EQ(ferry_max_ep_dispatch_wait(exchange.get(), nullptr, &again.received), FERRY_OK)
        << ferry_last_error();
    args = again.combine_args();
    args.own_ids = 1;
    args.topk_ids = again.ids.data();
    args.tokens = 2;
    ASSERT_EQ(ferry_max_ep_combine_async(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    ASSERT_EQ(ferry_max_ep_combine_wait(exchange.get(), nullptr), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(again.result, expected_result(again, me));
    EXPECT_EQ(ferry_max_synchronize(exchange.get(), nullptr), FERRY_OK);
    EXPECT_EQ(ferry_max_check(exchange.get(), 0), FERRY_OK);
  });
}

// In `bytes` of every part, from both ranks; token and slot name the source row.
void expect_parts(const ferry_max_dispatch_result& received, const std::vector<std::uint8_t>& sent,
                  const std::vector<std::int64_t>& bytes) {
  const std::size_t rows = received.row_offsets[received.expert_usage_stats[1]];
  ASSERT_GT(rows, 0u);
  std::int64_t at = 0;
  for (std::size_t p = 0; p < FERRY_MAX_PARTS; ++p) {
    const std::int64_t row_bytes = p < bytes.size() ? bytes[p] : 0;
    ASSERT_EQ(received.parts[p].row_bytes, row_bytes) << "part " << p;
    for (std::size_t row = 0; p < bytes.size() && row < rows; ++row) {
      const auto* got = static_cast<const std::uint8_t*>(received.parts[p].data) +
                        static_cast<std::int64_t>(row) * row_bytes;
      const std::uint8_t* want = sent.data() + at + received.src_info[2 * row] * row_bytes;
      EXPECT_TRUE(std::equal(got, got + row_bytes, want)) << "part " << p << ", row " << row;
    }
    at += 2 * row_bytes;
  }
}

TEST(MaxInC, AllRawPartsAreReceived) {
  std::mt19937 random(static_cast<unsigned>(test::seed()));
  const std::vector<std::int64_t> bytes = {32, 16, 48};
  std::vector<std::uint8_t> sent(2 * (32 + 16 + 48));
  for (std::uint8_t& byte : sent) byte = static_cast<std::uint8_t>(random());
  run_threads(2, [&](ferry_rank* rank) {
    ferry_config config = max_config();
    ASSERT_EQ(ferry_parse_format("raw:32+16+48", &config.format), FERRY_OK);
    const MaxHandle exchange = make_max(rank, config);
    Step step(ferry_rank_index(rank));
    std::int64_t at = 0;
    for (std::size_t p = 0; p < bytes.size(); at += 2 * bytes[p++])
      step.dispatch.input_tokens.parts[p] = sent.data() + at;
    ASSERT_EQ(ferry_max_ep_fused_dispatch(exchange.get(), &step.dispatch), FERRY_OK) << ferry_last_error();
    expect_parts(step.received, sent, bytes);
    EXPECT_EQ(step.received.tile_offsets, nullptr);
  });
}

// nvfp4: x = 3 in all columns has the code of 6 and the scale 0.5 / g, or with a bad g the scale 7F.
TEST(MaxInC, GlobalScalesAndFormatsOfACall) {
  run_threads(2, [&](ferry_rank* rank) {
    ferry_config config = max_config();
    config.hidden = 32;
    const MaxHandle exchange = make_max(rank, config);
    Step step(ferry_rank_index(rank));
    const std::vector<std::uint16_t> x(64, 0x4040);
    step.dispatch.input_tokens.parts[0] = x.data();
    step.dispatch.input_tokens.type = FERRY_BF16;
    ASSERT_EQ(ferry_parse_format("nvfp4", &step.dispatch.format), FERRY_OK);
    const auto scale = [&] { return *static_cast<const std::uint8_t*>(step.received.parts[1].data); };
    float g = 0.25f;
    step.dispatch.global_scale = &g;
    ASSERT_EQ(ferry_max_ep_fused_dispatch(exchange.get(), &step.dispatch), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(scale(), 0x40);  // 2 in e4m3
    g = -1;
    EXPECT_TRUE(is_refused(ferry_max_ep_fused_dispatch(exchange.get(), &step.dispatch), "global_scale = -1"));
    ASSERT_NE(step.received.parts[1].data, nullptr) << "the rows have come";
    EXPECT_EQ(scale(), 0x7F);
    step.dispatch.global_scale = nullptr;
    const std::vector<float> scales(7, 0.5f);
    step.dispatch.input_scales = scales.data();
    step.dispatch.input_scale_count = 7;
    ASSERT_EQ(ferry_max_ep_fused_dispatch(exchange.get(), &step.dispatch), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(scale(), 0x38);  // 1
    step.dispatch.input_scale_count = -1;
    EXPECT_TRUE(
        is_refused(ferry_max_ep_fused_dispatch(exchange.get(), &step.dispatch), "input_scale_count = -1"));
    EXPECT_EQ(step.received.output_tokens, nullptr);
  });
}

// Every rank passes the tokens of rank 0. Experts and the shared expert return their input; rank 1 has the
// shared rows of token 1 alone.
TEST(MaxInC, SkipA2aSumsTheRowsOfLocalExperts) {
  run_threads(2, [](ferry_rank* rank) {
    ferry_config config = fp32_config();
    EXPECT_EQ(ferry_max_skip_a2a(nullptr, 2), FERRY_USAGE);
    ASSERT_EQ(ferry_max_skip_a2a(&config, 2), FERRY_OK) << ferry_last_error();
    const MaxHandle exchange = make_max(rank, config);
    const std::size_t me = static_cast<std::size_t>(ferry_rank_index(rank));
    Step step(0);  // ids {3, 5}, {5, 0}: rank 0 has experts 0 to 2
    ASSERT_EQ(ferry_max_ep_fused_dispatch(exchange.get(), &step.dispatch), FERRY_OK) << ferry_last_error();
    auto args = step.combine_args();
    args.own_ids = 1;
    args.topk_ids = step.ids.data();
    args.tokens = 2;
    ASSERT_EQ(ferry_max_ep_fused_combine(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    const float factor[2][2] = {{0 + 1, 1 + 0}, {0.5f + 0.25f, 2 + 1}};  // [rank][token]
    for (std::size_t i = 0; i < 16; ++i)
      EXPECT_EQ(step.result[i], factor[me][i / 8] * step.values[i]) << "rank " << me << ", " << i;
  });
}

TEST(MaxInC, BadArgumentsEndTheCallOfEveryRank) {
  run_threads(2, [](ferry_rank* rank) {
    const MaxHandle exchange = make_max(rank, fp32_config());
    const int me = ferry_rank_index(rank);
    Step step(me);
    if (me == 1) step.dispatch.id_type = 7;
    EXPECT_TRUE(is_refused(ferry_max_ep_fused_dispatch(exchange.get(), &step.dispatch), "id_type = 7"));
    step.dispatch.id_type = FERRY_INT32;
    ASSERT_EQ(ferry_max_ep_fused_dispatch(exchange.get(), &step.dispatch), FERRY_OK) << ferry_last_error();
    const auto refused_combine = [&](const char* text, auto change) {
      auto args = step.combine_args();
      if (me == 1) change(args);
      EXPECT_TRUE(is_refused(ferry_max_ep_fused_combine(exchange.get(), &args), text));
    };
    using Args = ferry_max_combine_args;
    refused_combine("number = 5, must be 0 to 4", [](Args& args) { args.number = 5; });
    refused_combine("row_offsets is NULL", [](Args& args) { args.row_offsets = nullptr; });
    refused_combine("src_info is NULL", [](Args& args) { args.src_info = nullptr; });
    refused_combine("counts is NULL", [](Args& args) { args.counts = nullptr; });
    refused_combine("output_tokens.type = 9", [](Args& args) { args.output_tokens.type = 9; });
    refused_combine("row_offsets has 3 entries, counts give 4", [](Args& args) { args.number = 2; });
    refused_combine("tokens = -1", [](Args& args) {
      args.own_ids = 1;
      args.tokens = -1;
    });
    auto args = step.combine_args();
    ASSERT_EQ(ferry_max_ep_fused_combine(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(step.result, expected_result(step, me));
  });
}

TEST(MaxInC, UnsuitableConfigurationsAreRefused) {
  run_threads(1, [](ferry_rank* rank) {
    ferry_max_exchange* exchange = nullptr;
    ferry_config config = max_config();
    config.layout = FERRY_EXPERT_PADDED;
    EXPECT_TRUE(is_refused(ferry_max_exchange_create(rank, &config, &exchange), "must be expert_major"));
    EXPECT_EQ(exchange, nullptr);
    EXPECT_EQ(ferry_max_exchange_create(nullptr, &config, &exchange), FERRY_USAGE);
    ferry_max_exchange_destroy(nullptr);
  });
}

TEST(MaxInC, NullExchangesAreRefused) {
  const auto refused = [](ferry_status status) { EXPECT_TRUE(is_refused(status, "exchange is NULL")); };
  refused(ferry_max_ep_dispatch_async(nullptr, nullptr));
  refused(ferry_max_ep_dispatch_wait(nullptr, nullptr, nullptr));
  refused(ferry_max_ep_fused_dispatch(nullptr, nullptr));
  refused(ferry_max_ep_combine_async(nullptr, nullptr));
  refused(ferry_max_ep_combine_wait(nullptr, nullptr));
  refused(ferry_max_ep_fused_combine(nullptr, nullptr));
  refused(ferry_max_synchronize(nullptr, nullptr));
  refused(ferry_max_check(nullptr, 0));
}

}  // namespace
}  // namespace ferry::capi_test
