// Configurations through the C interface: defaults, round trips, size queries and refusals.
#include "ferry/exchange.hpp"

#include <string>
#include <vector>

#include "base/text.hpp"
#include "capi/convert.hpp"
#include "capi/run.hpp"

namespace ferry::capi_test {
namespace {

void expect_same_sizes(const ferry_sizes& c, const Sizes& cpp) {
  EXPECT_EQ(c.dispatch_staging, cpp.dispatch_staging);
  EXPECT_EQ(c.combine_staging, cpp.combine_staging);
  EXPECT_EQ(c.signals, cpp.signals);
  EXPECT_EQ(c.results, cpp.results);
  EXPECT_EQ(c.plans, cpp.plans);
  EXPECT_EQ(c.total, cpp.total());
  EXPECT_EQ(c.messages, cpp.messages);
}

TEST(Configuration, WithZerosHasEveryDefault) {
  run_threads(2, [&](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    auto config = sized<ferry_config>();
    ASSERT_EQ(ferry_exchange_config(exchange.get(), &config), FERRY_OK);
    EXPECT_EQ(config.backend, FERRY_CPU);
    EXPECT_EQ(config.layout, FERRY_EXPERT_MAJOR);
    EXPECT_EQ(config.alignment, 1);
    EXPECT_EQ(config.format.kind, FERRY_FORMAT_BF16);
    EXPECT_EQ(config.combine_type, FERRY_BF16);
    EXPECT_EQ(config.reduction, FERRY_PARTIAL);
    EXPECT_EQ(config.lanes, 1);
    EXPECT_EQ(config.deadline, 30.0);
    EXPECT_EQ(config.external_receive_buffers, 0);
    EXPECT_EQ(config.manual_check, 0);
    std::vector<std::int32_t> ranks(10, -7), locals(10, -7);
    ASSERT_EQ(ferry_placement_blocks(10, 2, ranks.data(), locals.data()), FERRY_OK);
    for (std::size_t e = 0; e < 10; ++e) {
      EXPECT_EQ(config.expert_rank[e], ranks[e]);
      EXPECT_EQ(config.expert_local[e], locals[e]);
      EXPECT_EQ(ranks[e], e < 5 ? 0 : 1);
      EXPECT_EQ(locals[e], static_cast<int>(e % 5));
    }
  });
}

TEST(Configuration, RoundTripsAndMakesTheSameExchange) {
  const std::vector<std::int32_t> ranks = {1, 0, 1, 1, 0, 1}, locals = {3, 1, 0, 1, 0, 2};
  auto given = sized<ferry_config>();
  given.experts = 6;
  given.top_k = 2;
  given.hidden = 64;
  given.max_tokens = 5;
  given.backend = FERRY_CPU;
  given.layout = FERRY_EXPERT_PADDED;
  given.expert_rank = ranks.data();
  given.expert_local = locals.data();
  given.placement_version = 77;
  given.capacity = 12;
  given.alignment = 4;
  given.repeats = 1;
  given.zero_padding = 1;
  given.combine_type = FERRY_FP32;
  given.format = {FERRY_FORMAT_RAW, 0, {32, 48, 0, 0}, {}};
  given.reduction = FERRY_UNREDUCED;
  given.layers = 5;
  given.lanes = 3;
  given.deadline = 4.5;
  given.external_receive_buffers = 1;
  given.manual_check = 1;
  given.engine = FERRY_ENGINE_MPI;
  given.reduction_level = FERRY_LEVEL_NODE;
  given.hops = FERRY_ONE_HOP;
  given.window = 7;
  given.memory = FERRY_HOST_MEMORY;
  given.count_waits = 1;
  run_threads(2, [&](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, given);
    auto got = sized<ferry_config>();
    ASSERT_EQ(ferry_exchange_config(exchange.get(), &got), FERRY_OK);
    for (std::size_t e = 0; e < 6; ++e) {
      EXPECT_EQ(got.expert_rank[e], ranks[e]);
      EXPECT_EQ(got.expert_local[e], locals[e]);
    }
    got.expert_rank = given.expert_rank;
    got.expert_local = given.expert_local;
    EXPECT_EQ(std::memcmp(&got, &given, sizeof got), 0);

    const Config& config = exchange->exchange.config();
    EXPECT_EQ(config.backend, BackendKind::cpu);
    EXPECT_EQ(config.layout, Layout::expert_padded);
    EXPECT_EQ(config.placement, Placement::table({{1, 3}, {0, 1}, {1, 0}, {1, 1}, {0, 0}, {1, 2}}, 2, 77));
    EXPECT_EQ(config.capacity, 12);
    EXPECT_EQ(config.alignment, 4);
    EXPECT_TRUE(config.repeats && config.zero_padding && !config.own_receive_buffers && !config.check_calls);
    EXPECT_EQ(config.format, Format::raw({32, 48}));
    EXPECT_EQ(config.combine_type, DType::fp32);
    EXPECT_EQ(config.reduction, Reduction::unreduced);
    EXPECT_EQ(config.layers, 5);
    EXPECT_EQ(config.lanes, 3);
    EXPECT_EQ(config.deadline, 4.5);
    EXPECT_EQ(config.engine, EngineKind::mpi);
    EXPECT_EQ(config.reduction_level, ReductionLevel::node);
    EXPECT_EQ(config.hops, Hops::one);
    EXPECT_EQ(config.window, 7);
    EXPECT_EQ(config.memory, MemoryKind::host);
    EXPECT_TRUE(config.count_waits);
    auto counts = sized<ferry_counts>();
    ASSERT_EQ(ferry_exchange_counts(exchange.get(), &counts), FERRY_OK);
    EXPECT_EQ(counts.dispatch_waits[1] + counts.combine_waits[1], 0);  // of no call
    auto sizes = sized<ferry_sizes>();
    ASSERT_EQ(ferry_exchange_sizes(exchange.get(), &sizes), FERRY_OK);
    expect_same_sizes(sizes, exchange->exchange.sizes());
    EXPECT_EQ(sizes.capacity, exchange->exchange.capacity());
  });
}

TEST(Configuration, SizeQueriesAgreeWithTheCppInterface) {
  ferry_config config = small_config();
  config.alignment = 8;
  config.format = {FERRY_FORMAT_FP8_E4M3, FERRY_FP8_POWER_OF_TWO, {}, {}};
  for (int rank = 0; rank < 3; ++rank) {
    auto sizes = sized<ferry_sizes>();
    ASSERT_EQ(ferry_sizes_of(&config, nullptr, 3, rank, &sizes), FERRY_OK) << ferry_last_error();
    const Config cpp = capi::to_config(config, 3);
    expect_same_sizes(sizes, size_of(cpp, 3, rank));
    EXPECT_EQ(sizes.capacity, capacity_of(cpp, 3, rank));
    EXPECT_EQ(sizes.plan_bytes, plan_bytes(cpp, 3));
    EXPECT_GT(sizes.plan_bytes, 0);
  }
}

TEST(Configuration, QueriesKnowTheNodes) {
  ferry_config config = small_config();
  config.backend = FERRY_COLLECTIVE;
  const std::vector<std::int32_t> nodes = {0, 0, 4};
  const Config cpp = capi::to_config(config, 3);
  for (int rank = 0; rank < 3; ++rank) {
    auto sizes = sized<ferry_sizes>();
    ASSERT_EQ(ferry_sizes_of(&config, nodes.data(), 3, rank, &sizes), FERRY_OK) << ferry_last_error();
    expect_same_sizes(sizes, size_of(cpp, Topology({0, 0, 1}), rank));
  }
}

TEST(Configuration, PutsExpertsInSlices) {
  run_threads(4, [](ferry_rank* rank) {
    ferry_config given = small_config();
    given.experts = 6;
    given.top_k = 2;
    given.hidden = 8;
    given.format.kind = FERRY_FORMAT_FP32;
    given.combine_type = FERRY_FP32;
    given.expert_slices = 2;
    const ExchangeHandle exchange = make_exchange(rank, given);
    EXPECT_EQ(exchange->exchange.config().placement, Placement::ep_tp(6, 2, 2));
    auto got = sized<ferry_config>();
    ASSERT_EQ(ferry_exchange_config(exchange.get(), &got), FERRY_OK);
    EXPECT_EQ(got.expert_slices, 2);
    EXPECT_EQ(capi::to_config(got, 4).placement, Placement::ep_tp(6, 2, 2));  // with the table it repeats
  });
}

TEST(Configuration, MistakesAreRefusedByTheQueries) {
  const auto refused = [](ferry_config config, const char* what) {
    std::int64_t bytes = -7;
    EXPECT_TRUE(is_refused(plan_bytes_of(&config, 2, &bytes), what));
    EXPECT_EQ(bytes, -7);
  };
  const std::vector<std::int32_t> ranks = {0, 0, 5, 0, 0, 0, 0, 0, 0, 0},
                                  locals = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const auto with = [](auto change) {
    ferry_config config = small_config();
    change(config);
    return config;
  };
  refused(with([](auto& c) { c.experts = 0; }), "experts = 0");
  refused(with([](auto& c) { c.top_k = 33; }), "top_k = 33");
  refused(with([](auto& c) { c.layout = 4; }), "ferry_config.layout = 4");
  refused(with([](auto& c) { c.backend = -1; }), "ferry_config.backend = -1");
  refused(with([](auto& c) { c.backend = FERRY_REFERENCE; }),
          "ferry_config.backend = 1, must be FERRY_BACKEND_AUTOMATIC (0), FERRY_CPU (2), FERRY_CUDA (3), "
          "FERRY_COLLECTIVE (4) or FERRY_NVSHMEM (5)");
  refused(with([](auto& c) { c.combine_type = 3; }), "ferry_config.combine_type = 3");
  refused(with([](auto& c) { c.reduction = 4; }), "reduction = 4");
  refused(with([](auto& c) { c.format.kind = 10; }), "ferry_format.kind = 10");
  refused(with([](auto& c) { c.format.flags = 1; }), "flags = 1 with kind FERRY_FORMAT_DEFAULT");
  refused(with([](auto& c) { c.format = {FERRY_FORMAT_FP8_E4M3, 8, {}, {}}; }),
          "flags = 8 with kind FERRY_FORMAT_FP8_E4M3");
  refused(with([](auto& c) { c.format.part_bytes[2] = 16; }), "part_bytes");
  refused(with([](auto& c) { c.deadline = -1; }), "deadline = -1");
  refused(with([&](auto& c) { c.expert_rank = ranks.data(); }), "go together");
  refused(with([&](auto& c) {
            c.expert_rank = ranks.data();
            c.expert_local = locals.data();
          }),
          "expert 2 is on rank 5");
  refused(with([](auto& c) { c.expert_slices = 3; }),
          "expert_slices = 3, must be 0 or a divisor of the 2 ranks");
  refused(with([](auto& c) { c.expert_slices = -1; }), "expert_slices = -1");
  refused(with([](auto& c) { c.expert_slices = 2, c.placement_version = 1; }), "placement_version");
  const std::vector<std::int32_t> held(40, 0), counts = {1, 41};
  refused(with([&](auto& c) { c.held_counts = counts.data(); }), "held_experts and held_counts go together");
  const auto with_held = [&](auto change) {
    return with([&](auto& c) {
      c.held_experts = held.data();
      c.held_counts = counts.data();
      change(c);
    });
  };
  refused(with_held([](auto&) {}), "held_counts[1] = 41, must be 0 to");
  refused(with_held([&](auto& c) { c.expert_rank = ranks.data(), c.expert_local = locals.data(); }),
          "two placements");
  const std::vector<std::int32_t> second(10, 1);
  refused(with([&](auto& c) {
            c.expert_slices = 2;
            c.expert_rank = second.data();
            c.expert_local = locals.data();
          }),
          "expert_slices = 2 with another placement");
}

TEST(Configuration, EncodersThatFailToGiveSizesAreNamed) {
  using PartBytes = ferry_status (*)(std::int32_t hidden, std::int64_t* part_bytes, void* user);
  const auto refused = [](const char* name, PartBytes part_bytes, const std::string& words) {
    ferry_encoder encoder{};
    encoder.size = sizeof encoder;
    encoder.part_bytes = part_bytes;
    encoder.on_host = [](const ferry_encoder_call*, void*) -> ferry_status { return FERRY_OK; };
    ferry_config config = small_config();
    ASSERT_EQ(ferry_register_format(name, &encoder, &config.format), FERRY_OK) << ferry_last_error();
    std::int64_t bytes = -7;
    EXPECT_TRUE(is_refused(plan_bytes_of(&config, 2, &bytes),
                           str("format ", name, ": part_bytes of its encoder, for hidden = ", config.hidden,
                               ", has failed", words)));
    EXPECT_EQ(bytes, -7);
  };
  refused(
      "sizes_fail", [](std::int32_t, std::int64_t*, void*) -> ferry_status { return FERRY_OTHER; },
      ": ferry_encoder.part_bytes returned ");
  refused(
      "sizes_throw", [](std::int32_t, std::int64_t*, void*) -> ferry_status { throw 7; },
      " with an exception that is not a std::exception");
}

}  // namespace
}  // namespace ferry::capi_test
