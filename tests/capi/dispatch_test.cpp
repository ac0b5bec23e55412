// Dispatches the same inputs through the C and the C++ interface and compares the bytes.
#include <tuple>

#include "capi/pair.hpp"
#include "capi/same.hpp"
#include "harness/harness.hpp"

namespace ferry::capi_test {
namespace {

// The upper byte of each bf16 value.
ferry_status first_byte_size(std::int32_t hidden, std::int64_t* part_bytes, void*) {
  part_bytes[0] = hidden;
  return FERRY_OK;
}

ferry_status take_first_bytes(const ferry_encoder_call* call, void* user) {
  for (std::int64_t row = 0; row < call->rows; ++row) {
    const auto* from = static_cast<const unsigned char*>(call->tokens) + row * call->stride;
    auto* to = static_cast<unsigned char*>(call->parts[0]) + row * call->part_strides[0];
    for (int column = 0; column < call->hidden; ++column) to[column] = from[2 * column + 1];
  }
  return user == nullptr && call->type == FERRY_BF16 && call->part_bytes[0] == call->hidden ? FERRY_OK
                                                                                            : FERRY_OTHER;
}

ferry_format registered_in_c() {
  ferry_encoder encoder{};
  encoder.size = sizeof encoder;
  encoder.part_bytes = first_byte_size;
  encoder.on_host = take_first_bytes;
  ferry_format format{};
  if (ferry_register_format("first_bytes", &encoder, &format) != FERRY_OK)
    throw std::runtime_error(ferry_last_error());
  return format;
}

struct FormatCase {
  const char* name;
  ferry_format c;
  Format cpp;
  DType input;
};

const FormatCase kFormats[] = {
    {"bf16", {FERRY_FORMAT_BF16, 0, {}}, Format::bf16(), DType::bf16},
    {"fp16", {FERRY_FORMAT_FP16, 0, {}}, Format::fp16(), DType::fp16},
    {"fp32", {FERRY_FORMAT_FP32, 0, {}}, Format::fp32(), DType::fp32},
    {"fp8", {FERRY_FORMAT_FP8_E4M3, 0, {}}, Format::fp8_e4m3(), DType::bf16},
    {"fp8_columns",
     {FERRY_FORMAT_FP8_E4M3, FERRY_SCALE_COLUMNS, {}},
     Format::fp8_e4m3({.column_major = true}),
     DType::bf16},
    {"fp8_packed",
     {FERRY_FORMAT_FP8_E4M3, FERRY_FP8_POWER_OF_TWO | FERRY_FP8_PACKED, {}},
     Format::fp8_e4m3({.power_of_two = true, .packed = true}),
     DType::bf16},
    {"mxfp8", {FERRY_FORMAT_MXFP8, FERRY_MX_OCP, {}}, Format::mxfp8({.rule = MxRule::ocp}), DType::bf16},
    {"mxfp4_columns",
     {FERRY_FORMAT_MXFP4, FERRY_SCALE_COLUMNS, {}},
     Format::mxfp4({.rule = MxRule::ocp, .column_major = true}),
     DType::bf16},
    {"nvfp4_per_token",
     {FERRY_FORMAT_NVFP4, FERRY_NVFP4_PER_TOKEN, {}},
     Format::nvfp4({.per_token = true}),
     DType::bf16},
    {"mxfp4_tiles",
     {FERRY_FORMAT_MXFP4, FERRY_SCALE_TILES, {}},
     Format::mxfp4({.rule = MxRule::ocp, .tiles = true}),
     DType::bf16},
    {"nvfp4_tiles", {FERRY_FORMAT_NVFP4, FERRY_SCALE_TILES, {}}, Format::nvfp4({.tiles = true}), DType::bf16},
    {"raw", {FERRY_FORMAT_RAW, 0, {64, 16}}, Format::raw({64, 16}), DType::bf16},
    {"registered", registered_in_c(), parse_format("first_bytes"), DType::bf16},
};

class DispatchByFormat : public testing::TestWithParam<std::tuple<int, FormatCase>> {};

TEST_P(DispatchByFormat, ReturnsTheSameBytesWhenArgumentsAreReused) {
  const auto& [layout, format] = GetParam();
  if (layout == FERRY_RANK_MAJOR && (format.c.flags & FERRY_SCALE_TILES) != 0) GTEST_SKIP() << "no tiles";
  ferry_config c_config = small_config();
  c_config.layout = layout;
  c_config.format = format.c;
  run_threads(kRanks, [&](ferry_rank* rank) {
    Config config{.experts = c_config.experts,
                  .top_k = c_config.top_k,
                  .hidden = c_config.hidden,
                  .max_tokens = c_config.max_tokens,
                  .layout = static_cast<Layout>(layout),
                  .format = format.cpp};
    const ExchangeHandle c = make_exchange(rank, c_config);
    Exchange cpp(rank->rank, config);
    contract::Random random(contract::seed_of(static_cast<std::uint64_t>(rank->rank.index())));
    Inputs in(c_config, random);

    auto rows = sized<ferry_dispatch_result>();
    auto args = sized<ferry_dispatch_args>();
    args.tokens.parts[0] = in.values.data();
    args.tokens.parts[1] = in.values.data() + in.count * 32;  // used by raw only
    args.tokens.count = in.count;
    args.tokens.type = static_cast<std::int32_t>(format.input);
    args.ids = in.ids.data();
    args.weights = in.weights.data();
    args.result = &rows;
    Tokens tokens = Tokens::rows(in.values.data(), in.count, format.input);
    tokens.parts[1] = args.tokens.parts[1];
    for (int call = 0; call < 2; ++call) {
      ASSERT_EQ(ferry_dispatch(c.get(), &args), FERRY_OK) << ferry_last_error();
      expect_same(rows, cpp.dispatch(tokens, in.ids.data(), in.weights.data()), cpp.config());
      // The next call reuses the argument struct with new data.
      in.values = Inputs::words(static_cast<std::int64_t>(in.values.size()), random);
      args.tokens.parts[0] = tokens.parts[0] = in.values.data();
      args.tokens.parts[1] = tokens.parts[1] = in.values.data() + in.count * 32;
    }
  });
}

std::string name_of_case(const testing::TestParamInfo<DispatchByFormat::ParamType>& info) {
  const std::string layouts[] = {"major_", "padded_", "rank_major_"};
  return layouts[std::get<0>(info.param)] + std::get<1>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(All, DispatchByFormat,
                         testing::Combine(testing::Values(FERRY_EXPERT_MAJOR, FERRY_EXPERT_PADDED,
                                                          FERRY_RANK_MAJOR),
                                          testing::ValuesIn(kFormats)),
                         name_of_case);

TEST(Dispatch, InPhasesOnAnotherLane) {
  ferry_config config = small_config();
  config.lanes = 2;
  run_threads(kRanks, [&](ferry_rank* rank) {
    Pair pair(rank, config);
    pair.args.lane = 1;
    const auto before = pair.rows;
    ASSERT_EQ(ferry_dispatch_send(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(std::memcmp(&before, &pair.rows, sizeof before), 0)
        << "the send phase must not write the result";
    auto receive = sized<ferry_dispatch_receive_args>();
    receive.lane = 1;
    receive.result = &pair.rows;
    ASSERT_EQ(ferry_dispatch_receive(pair.c.get(), &receive), FERRY_OK) << ferry_last_error();
    const DispatchResult expected =
        pair.cpp.dispatch(pair.tokens, pair.in.ids.data(), pair.in.weights.data());
    expect_same(pair.rows, expected, pair.cpp.config());

    auto last = sized<ferry_dispatch_result>();
    ASSERT_EQ(ferry_last_dispatch_result(pair.c.get(), 1, &last), FERRY_OK);
    EXPECT_EQ(std::memcmp(&last, &pair.rows, sizeof last), 0);
  });
}

TEST(Dispatch, FromACopiedPlanWithInt64IdsIntoTheCallersMemory) {
  run_threads(kRanks, [&](ferry_rank* rank) {
    ferry_config config = small_config();
    Pair pair(rank, config);
    const std::vector<std::int64_t> wide(pair.in.ids.begin(), pair.in.ids.end());
    const std::int64_t none = 0;
    pair.args.ids = wide.empty() ? &none : wide.data();
    pair.args.id_type = FERRY_INT64;
    std::int64_t capacity = 0, bytes = 0;
    ASSERT_EQ(ferry_exchange_capacity(pair.c.get(), &capacity), FERRY_OK);
    ASSERT_EQ(ferry_plan_bytes(&config, kRanks, &bytes), FERRY_OK);
    EXPECT_EQ(capacity, pair.cpp.capacity());
    contract::GuardedBuffer rows(capacity * config.hidden * 2), weight(capacity * 4), groups(capacity * 4);
    contract::GuardedBuffer plan(bytes), copy(bytes);
    pair.args.memory.parts[0] = rows.data();
    pair.args.memory.weight = weight.as<float>();
    pair.args.memory.group_of_row = groups.as<std::int32_t>();
    pair.args.memory.plan = plan.data();
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(pair.rows.data, rows.data());
    EXPECT_EQ(pair.rows.plan.storage, plan.data());
    contract::GuardedBuffer cpp_groups(capacity * 4);
    DispatchOptions options;
    options.memory.group_of_row = cpp_groups.as<std::int32_t>();
    const DispatchResult expected =
        pair.cpp.dispatch(pair.tokens, pair.in.ids.data(), pair.in.weights.data(), options);
    expect_same(pair.rows, expected, pair.cpp.config());

    ASSERT_EQ(ferry_plan_copy(&pair.rows.plan, copy.data(), static_cast<std::size_t>(bytes), &pair.args.plan),
              FERRY_OK);
    plan.fill(contract::kPoison);
    pair.args.ids = nullptr;
    pair.args.memory.plan = nullptr;
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    expect_same(pair.rows,
                pair.cpp.dispatch(pair.tokens, expected.plan.copy(), pair.in.weights.data(), options),
                pair.cpp.config());
    for (const contract::GuardedBuffer* memory : {&rows, &weight, &groups, &plan, &copy})
      memory->require_guards("memory");
  });
}

TEST(Dispatch, AcceptsTokensWithAStride) {
  run_threads(kRanks, [&](ferry_rank* rank) {
    const ferry_config config = small_config();
    Pair pair(rank, config);
    const std::int64_t row = 2 * config.hidden, stride = row + 48;
    contract::GuardedBuffer strided(pair.in.count * stride);
    for (int token = 0; token < pair.in.count; ++token) {
      std::memcpy(strided.data() + token * stride, pair.in.values.data() + token * config.hidden,
                  static_cast<std::size_t>(row));
    }
    pair.args.tokens.parts[0] = strided.data();
    pair.args.tokens.strides[0] = stride;
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    expect_same(pair.rows, pair.cpp.dispatch(pair.tokens, pair.in.ids.data(), pair.in.weights.data()),
                pair.cpp.config());
  });
}

// A null pointer of weights is not taken for their absence where `weighted` says that they are there.
TEST(Dispatch, WithoutTokensAnywhereHasWeights) {
  run_threads(kRanks, [&](ferry_rank* rank) {
    Pair pair(rank, small_config());
    pair.args.tokens.count = 0;
    for (const bool weighted : {true, false}) {
      pair.args.weights = nullptr;
      pair.args.weighted = weighted;
      ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
      EXPECT_EQ(pair.rows.weight != nullptr, weighted);
    }
    pair.args.weights = pair.in.weights.data();
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    EXPECT_NE(pair.rows.weight, nullptr);
  });
}

TEST(Dispatch, AppliesWeightsAndComputesDots) {
  run_threads(kRanks, [&](ferry_rank* rank) {
    Pair pair(rank, small_config());
    pair.args.apply_weights = 1;
    pair.args.dot_rows = pair.in.outputs.data();
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    DispatchOptions options;
    options.apply_weights = true;
    options.dot_rows = pair.in.outputs.data();
    expect_same(pair.rows,
                pair.cpp.dispatch(pair.tokens, pair.in.ids.data(), pair.in.weights.data(), options),
                pair.cpp.config());
    EXPECT_NE(pair.rows.dots, nullptr);
  });
}

}  // namespace
}  // namespace ferry::capi_test
