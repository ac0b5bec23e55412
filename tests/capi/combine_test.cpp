// Runs every operation but dispatch through the C and the C++ interface and compares the bytes.
#include "capi/pair.hpp"
#include "capi/same.hpp"

namespace ferry::capi_test {
namespace {

struct CombineCase {
  const char* name;
  int reduction;
  bool row_weights, topk_weights, split;
  int shared_experts = 0;
  bool shared_outputs = false;
};

const CombineCase kCases[] = {
    {"default", FERRY_REDUCTION_DEFAULT, true, false, false},
    {"partial", FERRY_PARTIAL, true, false, false},
    {"partial_topk_weights", FERRY_PARTIAL, false, true, false},
    {"partial_split", FERRY_PARTIAL, true, false, true},
    {"exact", FERRY_EXACT, false, false, false},
    {"exact_topk_weights_split", FERRY_EXACT, false, true, true},
    {"unreduced", FERRY_UNREDUCED, false, false, false},
    {"shared_experts", FERRY_PARTIAL, true, false, false, 2},
    {"shared_outputs_unreduced_split", FERRY_UNREDUCED, false, false, true, 2, true},
};

class Combine : public testing::TestWithParam<CombineCase> {};

TEST_P(Combine, ReturnsTheSameBytesWhenArgumentsAreReused) {
  const CombineCase& which = GetParam();
  ferry_config config = small_config();
  config.reduction = FERRY_EXACT;  // room for all three reductions
  config.shared_experts = which.shared_experts;
  run_threads(kRanks, [&](ferry_rank* rank) {
    Pair pair(rank, config);
    auto taken = sized<ferry_config>();
    ASSERT_EQ(ferry_exchange_config(pair.c.get(), &taken), FERRY_OK);
    EXPECT_EQ(taken.shared_experts, which.shared_experts);
    EXPECT_EQ(pair.cpp.config().shared_experts, which.shared_experts);
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    const DispatchResult rows = pair.cpp.dispatch(pair.tokens, pair.in.ids.data(), pair.in.weights.data());

    const bool unreduced = which.reduction == FERRY_UNREDUCED;
    const std::int64_t stride = 2 * config.hidden + 32;
    const std::int64_t results = std::int64_t{pair.in.count} * (unreduced ? config.top_k : 1);
    contract::GuardedBuffer c_result(results * stride), cpp_result(results * stride);
    contract::GuardedBuffer c_values(4 * pair.in.count * config.top_k), cpp_values(c_values.bytes());
    contract::GuardedBuffer c_shared(2 * pair.in.count * config.hidden * which.shared_experts),
        cpp_shared(c_shared.bytes());

    auto args = sized<ferry_combine_args>();
    args.outputs.data = pair.in.outputs.data();
    args.result = {c_result.data(), stride, FERRY_BF16};
    args.plan = pair.rows.plan;
    args.row_weights = which.row_weights ? pair.rows.weight : nullptr;
    args.topk_weights = which.topk_weights ? pair.in.weights.data() : nullptr;
    args.row_values = pair.rows.weight;
    args.route_values = c_values.as<float>();
    args.reduction = which.reduction;
    args.shared_outputs = which.shared_outputs ? c_shared.data() : nullptr;
    CombineOptions options;
    options.shared_outputs = which.shared_outputs ? cpp_shared.data() : nullptr;
    options.row_weights = which.row_weights ? rows.weight : nullptr;
    options.topk_weights = which.topk_weights ? pair.in.weights.data() : nullptr;
    options.row_values = rows.weight;
    options.route_values = cpp_values.as<float>();
    if (which.reduction != FERRY_REDUCTION_DEFAULT)
      options.reduction = static_cast<Reduction>(which.reduction - 1);

    const auto receive = sized<ferry_combine_receive_args>();
    for (int call = 0; call < 2; ++call) {
      for (contract::GuardedBuffer* buffer :
           {&c_result, &cpp_result, &c_values, &cpp_values, &c_shared, &cpp_shared}) {
        buffer->fill(contract::kPoison);
      }
      if (which.split) {
        ASSERT_EQ(ferry_combine_send(pair.c.get(), &args), FERRY_OK) << ferry_last_error();
        ASSERT_EQ(ferry_combine_receive(pair.c.get(), &receive), FERRY_OK) << ferry_last_error();
      } else {
        ASSERT_EQ(ferry_combine(pair.c.get(), &args), FERRY_OK) << ferry_last_error();
      }
      pair.cpp.combine({.data = pair.in.outputs.data()}, rows.plan,
                       {.data = cpp_result.data(), .stride = stride}, options);
      expect_same_array(c_result.data(), cpp_result.data(), c_result.bytes(), "result");
      expect_same_array(c_values.data(), cpp_values.data(), c_values.bytes(), "route values");
      c_result.require_guards("result");
      expect_same_array(c_shared.data(), cpp_shared.data(), c_shared.bytes(), "shared outputs");
      c_values.require_guards("route values");
      c_shared.require_guards("shared outputs");
      pair.in.outputs.assign(pair.in.outputs.rbegin(), pair.in.outputs.rend());
    }
  });
}

// A result may be its residual; other arrays that overlap are refused on every rank.
TEST(Residual, IsTheResultOrLiesApart) {
  ferry_config config = small_config();
  run_threads(kRanks, [&](ferry_rank* rank) {
    Pair pair(rank, config, 1);  // an empty result overlaps nothing
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    const DispatchResult rows = pair.cpp.dispatch(pair.tokens, pair.in.ids.data(), pair.in.weights.data());
    const std::int64_t bytes = 2 * pair.in.count * config.hidden;
    contract::GuardedBuffer sum(bytes), expected(bytes), residual(bytes);
    std::copy_n(reinterpret_cast<const std::byte*>(pair.in.values.data()), bytes, sum.data());
    std::copy_n(sum.data(), bytes, residual.data());
    ferry_epilogue epilogue{sum.data(), 0, 2.0};
    auto args = sized<ferry_combine_args>();
    args.outputs.data = pair.in.outputs.data();
    args.output_rows = *pair.rows.total;
    args.result.data = sum.data();
    args.plan = pair.rows.plan;
    args.epilogue = &epilogue;
    ASSERT_EQ(ferry_combine(pair.c.get(), &args), FERRY_OK) << ferry_last_error();
    pair.cpp.combine({.data = pair.in.outputs.data()}, rows.plan, {.data = expected.data()},
                     {.epilogue = {.residual = residual.data(), .scale = 2}});
    expect_same_array(sum.data(), expected.data(), bytes, "result");
    if (ferry_rank_index(rank) == 1) args.outputs.data = sum.data();
    EXPECT_EQ(ferry_combine(pair.c.get(), &args), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("result (") && last_error_contains("overlaps outputs ("));
    args.outputs.data = pair.in.outputs.data();
    EXPECT_EQ(ferry_combine(pair.c.get(), &args), FERRY_OK) << ferry_last_error();
  });
}

INSTANTIATE_TEST_SUITE_P(All, Combine, testing::ValuesIn(kCases),
                         [](const auto& instance) { return std::string(instance.param.name); });

// Every rank passes the tokens of a rank with the same random numbers.
TEST(ReplicatedInput, ReturnsTheSameBytes) {
  ferry_config config = small_config();
  config.shared_experts = 1;
  config.input = FERRY_INPUT_REPLICATED;
  config.shared_split = 2;
  run_threads(kRanks, [&](ferry_rank* rank) {
    const ExchangeHandle c = make_exchange(rank, config);
    Exchange cpp(rank->rank, capi::to_config(config, kRanks));
    auto taken = sized<ferry_config>();
    ASSERT_EQ(ferry_exchange_config(c.get(), &taken), FERRY_OK);
    EXPECT_EQ(taken.input, FERRY_INPUT_REPLICATED);
    EXPECT_EQ(taken.shared_split, 2);
    contract::Random random(contract::seed_of(7));
    Inputs in(config, random);
    auto rows = sized<ferry_dispatch_result>();
    auto args = sized<ferry_dispatch_args>();
    args.tokens.parts[0] = in.values.data();
    args.tokens.count = in.count;
    args.ids = in.ids.data();
    args.weights = in.weights.data();
    args.result = &rows;
    ASSERT_EQ(ferry_dispatch(c.get(), &args), FERRY_OK) << ferry_last_error();
    const DispatchResult expected =
        cpp.dispatch(Tokens::rows(in.values.data(), in.count), in.ids.data(), in.weights.data());
    ASSERT_EQ(*rows.total, *expected.total);
    expect_same_array(static_cast<const std::byte*>(rows.data), static_cast<const std::byte*>(expected.data),
                      *expected.total * 2 * config.hidden, "rows");
    expect_same_array(rows.source, expected.source, *expected.total, "sources");
    auto wire = sized<ferry_wire_counts>();
    ASSERT_EQ(ferry_get_wire_counts(c.get(), &wire), FERRY_OK);
    EXPECT_EQ(wire.dispatch_bytes, 0);
  });
}

TEST(CombineBackward, ReturnsTheSameBytes) {
  run_threads(kRanks, [&](ferry_rank* rank) {
    const ferry_config config = small_config();
    Pair pair(rank, config);
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    const Plan plan = pair.cpp.dispatch(pair.tokens, pair.in.ids.data(), pair.in.weights.data()).plan.copy();

    contract::GuardedBuffer c_weights(4 * pair.in.count * config.top_k), cpp_weights(c_weights.bytes());
    auto rows = sized<ferry_dispatch_result>();
    auto args = sized<ferry_combine_backward_args>();
    args.d_result = pair.args.tokens;
    args.plan = pair.rows.plan;
    args.topk_weights = pair.in.weights.data();
    args.outputs = pair.in.outputs.data();
    args.d_weights = c_weights.as<float>();
    args.result = &rows;
    ASSERT_EQ(ferry_combine_backward(pair.c.get(), &args), FERRY_OK) << ferry_last_error();
    const DispatchResult expected = pair.cpp.combine_backward(
        pair.tokens, plan, pair.in.weights.data(), {.data = pair.in.outputs.data()}, cpp_weights.as<float>());
    expect_same(rows, expected, pair.cpp.config());
    expect_same_array(c_weights.data(), cpp_weights.data(), c_weights.bytes(), "d_weights");
    c_weights.require_guards("d_weights");
  });
}

TEST(RouteValues, ReturnsTheSameBytes) {
  run_threads(kRanks, [&](ferry_rank* rank) {
    Pair pair(rank, small_config());
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    const DispatchResult rows = pair.cpp.dispatch(pair.tokens, pair.in.ids.data(), pair.in.weights.data());
    contract::GuardedBuffer c_values(4 * *rows.total), cpp_values(c_values.bytes());
    auto args = sized<ferry_route_values_args>();
    args.values = pair.in.weights.data();
    args.plan = pair.rows.plan;
    args.row_values = c_values.as<float>();
    ASSERT_EQ(ferry_route_values(pair.c.get(), &args), FERRY_OK) << ferry_last_error();
    pair.cpp.route_values(pair.in.weights.data(), rows.plan, cpp_values.as<float>());
    expect_same_array(c_values.data(), cpp_values.data(), c_values.bytes(), "row values");
    c_values.require_guards("row values");
  });
}

TEST(Metadata, IsSumPrefixAndMaximum) {
  run_threads(kRanks, [&](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    const int counts[kRanks] = {5, 0, 11}, prefixes[kRanks] = {0, 5, 5};
    const ferry_step_metadata* metadata = nullptr;
    auto args = sized<ferry_metadata_args>();
    args.count = counts[ferry_rank_index(rank)];
    args.metadata = &metadata;
    ASSERT_EQ(ferry_metadata(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(metadata->sum, 16);
    EXPECT_EQ(metadata->prefix, prefixes[ferry_rank_index(rank)]);
    EXPECT_EQ(metadata->maximum, 11);
  });
}

TEST(Counts, AreTheSameInBothInterfaces) {
  run_threads(kRanks, [&](ferry_rank* rank) {
    const ferry_config config = small_config();
    Pair pair(rank, config);
    ASSERT_EQ(ferry_dispatch(pair.c.get(), &pair.args), FERRY_OK) << ferry_last_error();
    pair.cpp.dispatch(pair.tokens, pair.in.ids.data(), pair.in.weights.data());

    auto load = sized<ferry_load_counts>();
    ASSERT_EQ(ferry_get_load_counts(pair.c.get(), &load), FERRY_OK);
    const LoadCounts expected = pair.cpp.load_counts();
    EXPECT_EQ(load.dispatches, expected.dispatches);
    expect_same_array(load.experts, expected.experts.data(), config.experts, "experts");
    expect_same_array(load.ranks, expected.ranks.data(), kRanks, "ranks");

    auto wire = sized<ferry_wire_counts>();
    ASSERT_EQ(ferry_get_wire_counts(pair.c.get(), &wire), FERRY_OK);
    EXPECT_EQ(wire.dispatch_bytes, pair.cpp.wire_counts().dispatch_bytes);
    EXPECT_EQ(wire.dispatch_messages, pair.cpp.wire_counts().dispatch_messages);
    EXPECT_EQ(wire.combine_bytes, pair.cpp.wire_counts().combine_bytes);
    EXPECT_EQ(wire.combine_messages, pair.cpp.wire_counts().combine_messages);
  });
}

}  // namespace
}  // namespace ferry::capi_test
