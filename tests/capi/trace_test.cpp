// Traces through the C interface are those of the C++ interface.
#include "ferry/trace.hpp"

#include <filesystem>
#include <string>
#include <vector>

#include "capi/run.hpp"

namespace ferry::capi_test {
namespace {

using TraceHandle = std::unique_ptr<ferry_trace, void (*)(ferry_trace*)>;

TraceHandle open(const std::string& name) {
  ferry_trace* trace = nullptr;
  EXPECT_EQ(ferry_trace_open(name.c_str(), nullptr, 0, &trace), FERRY_OK) << ferry_last_error();
  return {trace, ferry_trace_destroy};
}

ferry_trace_info query(const ferry_trace* trace) {
  auto info = sized<ferry_trace_info>();
  EXPECT_EQ(ferry_trace_query(trace, &info), FERRY_OK) << ferry_last_error();
  return info;
}

TEST(Traces, AreThoseOfTheOtherInterface) {
  const std::string name = "synth:decode:experts=16,top_k=2,tokens=24,layers=2";
  const Trace cpp = open_trace(name);
  const TraceHandle c = open(name);
  const ferry_trace_info info = query(c.get());
  EXPECT_EQ(info.name, cpp.name);
  EXPECT_EQ(info.source, cpp.source);
  ASSERT_EQ(info.layers * info.tokens * info.top_k, static_cast<std::int64_t>(cpp.ids.size()));
  EXPECT_EQ(info.experts, cpp.experts);
  EXPECT_EQ(std::vector(info.ids, info.ids + cpp.ids.size()), cpp.ids);
  EXPECT_EQ(std::vector(info.weights, info.weights + cpp.weights.size()), cpp.weights);

  ASSERT_EQ(info.sequences, static_cast<std::int64_t>(cpp.sequence_lengths.size()));
  ASSERT_GT(info.sequences, 0);
  EXPECT_EQ(std::vector(info.sequence_lengths, info.sequence_lengths + info.sequences), cpp.sequence_lengths);

  const PartitionSpec spec{.layer = 1, .rank = 2, .ranks = 3, .tokens_per_rank = 5, .step = 4};
  const TracePartition part = partition(cpp, spec);
  std::vector<std::int32_t> ids(part.ids.size());
  std::vector<float> weights(part.weights.size());
  std::int64_t first = -1;
  auto args = sized<ferry_trace_partition_args>();
  args.layer = spec.layer;
  args.rank = spec.rank;
  args.ranks = spec.ranks;
  args.tokens_per_rank = spec.tokens_per_rank;
  args.step = spec.step;
  args.ids = ids.data();
  ASSERT_EQ(ferry_trace_partition(c.get(), &args), FERRY_OK) << ferry_last_error();
  args.weights = weights.data();
  args.first_token = &first;
  ASSERT_EQ(ferry_trace_partition(c.get(), &args), FERRY_OK) << ferry_last_error();
  EXPECT_EQ(ids, part.ids);
  EXPECT_EQ(weights, part.weights);
  EXPECT_EQ(first, part.first_token);
  args.layer = 2;
  EXPECT_EQ(ferry_trace_partition(c.get(), &args), FERRY_USAGE);
}

TEST(Traces, HaveTheStatisticsOfTheOtherInterface) {
  const std::string name = "synth:decode:experts=16,top_k=2,tokens=24,layers=2";
  const Trace cpp = open_trace(name);
  const TraceHandle c = open(name);
  std::vector<std::int64_t> counts(16, -7);
  ASSERT_EQ(ferry_trace_expert_counts(c.get(), 1, counts.data()), FERRY_OK) << ferry_last_error();
  EXPECT_EQ(counts, expert_counts(cpp, 1));
  EXPECT_EQ(ferry_trace_expert_counts(c.get(), 2, counts.data()), FERRY_USAGE);

  std::vector<std::int64_t> ranks(3, -7);
  ASSERT_EQ(ferry_rank_counts(counts.data(), 16, nullptr, 3, ranks.data()), FERRY_OK) << ferry_last_error();
  EXPECT_EQ(ranks, rank_counts(counts, Placement::blocks(16, 3)));
  std::vector<std::int32_t> rank_of(16);
  std::vector<std::int64_t> expected(3, 0);
  for (std::size_t e = 0; e < 16; ++e) {
    rank_of[e] = static_cast<std::int32_t>(e * 7 % 3);
    expected[e * 7 % 3] += counts[e];
  }
  ASSERT_EQ(ferry_rank_counts(counts.data(), 16, rank_of.data(), 3, ranks.data()), FERRY_OK);
  EXPECT_EQ(ranks, expected);
  rank_of[5] = 3;
  EXPECT_TRUE(is_refused(ferry_rank_counts(counts.data(), 16, rank_of.data(), 3, ranks.data()),
                         "expert 5 is on rank 3"));

  auto found = sized<ferry_load_statistics>();
  ASSERT_EQ(ferry_statistics_of_load(counts.data(), 16, &found), FERRY_OK) << ferry_last_error();
  const LoadStatistics same = load_statistics(counts);
  EXPECT_EQ(found.routes, same.routes);
  EXPECT_EQ(
      std::vector(
          {found.max, found.p99, found.p90, found.p50, found.p10, found.min, found.sigma_ln, found.gini}),
      std::vector({same.max, same.p99, same.p90, same.p50, same.p10, same.min, same.sigma_ln, same.gini}));
  EXPECT_EQ(found.idle, same.idle);
  EXPECT_EQ(ferry_statistics_of_load(counts.data(), 0, &found), FERRY_USAGE);
}

TEST(Traces, AreSavedAndReadBack) {
  const std::string prefix = testing::TempDir() + "capi_trace";
  const TraceHandle made = open("synth:uniform:experts=8,top_k=2,tokens=6,layers=1");
  ASSERT_EQ(ferry_trace_save(made.get(), prefix.c_str()), FERRY_OK) << ferry_last_error();
  const TraceHandle back = open(prefix + ".ids.npy");
  const ferry_trace_info a = query(made.get()), b = query(back.get());
  EXPECT_EQ(std::vector(a.ids, a.ids + 12), std::vector(b.ids, b.ids + 12));
  for (const char* end : {".ids.npy", ".weights.npy", ".seqlens.npy"}) std::filesystem::remove(prefix + end);
}

TEST(Traces, ThatDoNotExistAreRefused) {
  ferry_trace* trace = nullptr;
  EXPECT_EQ(ferry_trace_open("synth:nonsense", nullptr, 0, &trace), FERRY_USAGE);
  EXPECT_NE(ferry_trace_open("/no/such/file.npy", nullptr, 0, &trace), FERRY_OK);
  EXPECT_EQ(trace, nullptr);
}

}  // namespace
}  // namespace ferry::capi_test
