#include "tools/report/summary.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ferry/error.hpp"
#include "report/synthetic_run.hpp"
#include "seed.hpp"

namespace ferry::report {
namespace {

std::vector<double> ascending(int n) {
  std::vector<double> values;
  for (int i = 0; i < n; ++i) values.push_back(10.0 * i);
  return values;
}

TEST(Percentile, IsTheValueAtTheRoundedIndex) {
  EXPECT_EQ(percentile({}, 50), 0.0);
  EXPECT_EQ(percentile(ascending(1), 99), 0.0);
  EXPECT_EQ(percentile(ascending(2), 50), 10.0);  // index 0.5 rounds up
  EXPECT_EQ(percentile(ascending(3), 50), 10.0);
  EXPECT_EQ(percentile(ascending(4), 50), 20.0);  // index 1.5
  EXPECT_EQ(percentile(ascending(101), 99), 990.0);
  EXPECT_EQ(percentile(ascending(100), 99), 980.0);  // index 98.01
  EXPECT_EQ(percentile(ascending(5), 0), 0.0);
  EXPECT_EQ(percentile(ascending(5), 100), 40.0);
}

// Two ranks and three steps with times that are easy to add up.
RunReport by_hand() {
  RunReport run;
  run.workload = {.tokens_per_rank = 10, .steps = 3};
  run.configuration = {.ranks = 2, .node_of_rank = {0, 0}, .experts = 3, .top_k = 1};
  run.machine.memcpy_bytes_per_second = 1e9;
  const auto times = [](double start, double dispatch, double experts, double combine) {
    StepTimes t;
    t[StepStage::dispatch] = {start, start + dispatch};
    t[StepStage::experts] = {start + dispatch, start + dispatch + experts};
    t[StepStage::combine] = {start + dispatch + experts, start + dispatch + experts + combine};
    return t;
  };
  run.times = {times(0, 10, 100, 20),   times(5, 30, 50, 20),    //
               times(200, 20, 100, 20), times(200, 10, 80, 60),  //
               times(400, 5, 10, 5),    times(390, 40, 10, 5)};
  run.dispatch = {.traffic_bytes = {100, 1, 2, 200}, .wire_bytes = 3, .messages = 2, .moved_bytes = 45'000};
  run.combine = {.traffic_bytes = {7, 8, 9, 10}, .wire_bytes = 17, .messages = 2, .moved_bytes = 0};
  run.load = {.routes_per_expert = {0, 45, 15}, .rank_of_expert = {0, 0, 1}, .rows_per_rank = {45, 15}};
  run.checks = {{.name = "a", .passed = true}, {.name = "b", .passed = false}};
  return run;
}

TEST(Summary, TimesAreThoseOfTheSlowestRank) {
  const Summary summary = summarise(by_hand());
  EXPECT_DOUBLE_EQ(summary[StepStage::dispatch].p50_us, 30);  // of 30, 20, 40
  EXPECT_DOUBLE_EQ(summary[StepStage::dispatch].mean_us, 30);
  EXPECT_DOUBLE_EQ(summary[StepStage::dispatch].max_us, 40);
  EXPECT_DOUBLE_EQ(summary[StepStage::experts].p50_us, 100);  // of 100, 100, 10
  EXPECT_DOUBLE_EQ(summary[StepStage::combine].p90_us, 60);   // of 20, 60, 5
  EXPECT_DOUBLE_EQ(summary.step.p50_us, 130);                 // of 130, 150, 55
  EXPECT_DOUBLE_EQ(summary.step.max_us, 150);
  EXPECT_DOUBLE_EQ(summary.tokens_per_second, 60 / 335e-6);
}

TEST(Summary, ThePercentile99NeedsAHundredSteps) {
  RunReport run = by_hand();
  EXPECT_FALSE(summarise(run).step.p99_us);
  const std::vector<StepTimes> three = run.times;
  for (int more = 0; more < 32; ++more) run.times.insert(run.times.end(), three.begin(), three.end());
  run.workload.steps = 99;
  EXPECT_FALSE(summarise(run).step.p99_us);
  run.times.insert(run.times.end(), three.begin(), three.begin() + 2);
  run.workload.steps = 100;
  EXPECT_DOUBLE_EQ(summarise(run).step.p99_us.value(), 150);
}

TEST(Summary, SharesAddUpToTheStep) {
  const StepShares shares = summarise(by_hand()).shares;
  EXPECT_DOUBLE_EQ(shares.dispatch_us, 115.0 / 6);
  EXPECT_DOUBLE_EQ(shares.experts_us, 350.0 / 6);
  EXPECT_DOUBLE_EQ(shares.combine_us, 130.0 / 6);
  EXPECT_DOUBLE_EQ(shares.step_us, 335.0 / 3);
  EXPECT_NEAR(shares.waiting_us, 12.5, 1e-9);
}

TEST(Summary, FlowsExcludeTheDiagonal) {
  const Summary summary = summarise(by_hand());
  EXPECT_EQ(summary.dispatch.local_bytes, 300);
  EXPECT_EQ(summary.dispatch.sent_bytes, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(summary.dispatch.received_bytes, (std::vector<std::int64_t>{2, 1}));
  EXPECT_DOUBLE_EQ(summary.dispatch.bytes_per_second, 45'000 / 90e-6);
  EXPECT_DOUBLE_EQ(summary.dispatch.share_of_memcpy.value(), 0.5);
}

TEST(Summary, TrafficOfNodesIsTheSumOverTheirRanks) {
  RunReport run = by_hand();
  EXPECT_TRUE(summarise(run).dispatch.node_traffic_bytes.empty());
  EXPECT_EQ(summarise(run).dispatch.between_nodes_bytes, 0);
  run.configuration.ranks = 3;
  run.configuration.nodes = 2;
  run.configuration.node_of_rank = {0, 1, 0};
  for (int i = 0; i < 3; ++i) run.times.push_back(run.times.back());
  run.load.rows_per_rank.push_back(0);
  run.combine.traffic_bytes.resize(9);
  run.dispatch.traffic_bytes = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  const Flow flow = summarise(run).dispatch;
  EXPECT_EQ(flow.node_traffic_bytes, (std::vector<std::int64_t>{1 + 4 + 64 + 256, 2 + 128, 8 + 32, 16}));
  EXPECT_EQ(flow.between_nodes_bytes, 2 + 128 + 8 + 32);
  run.configuration.node_of_rank = {0, 2, 0};
  EXPECT_THROW(validate(run), UsageError);
}

TEST(Summary, BusiestIsRelativeToTheMean) {
  const Summary summary = summarise(by_hand());
  EXPECT_EQ(summary.expert.index, 1);
  EXPECT_DOUBLE_EQ(summary.expert.mean, 20);
  EXPECT_DOUBLE_EQ(summary.expert.over_mean, 2.25);
  EXPECT_EQ(summary.rank.index, 0);
  EXPECT_DOUBLE_EQ(summary.rank.over_mean, 1.5);
  EXPECT_EQ(summary.idle_experts, 1);
  EXPECT_EQ(summary.checks_passed, 1);
}

TEST(Summary, ARunWithoutLoadOrTimeHasFiniteFigures) {
  RunReport run = by_hand();
  run.load.routes_per_expert = {0, 0, 0};
  run.load.rows_per_rank = {0, 0};
  run.times.assign(run.times.size(), StepTimes{});
  const Summary summary = summarise(run);
  EXPECT_EQ(summary.expert.over_mean, 0.0);
  EXPECT_EQ(summary.dispatch.bytes_per_second, 0.0);
  EXPECT_EQ(summary.tokens_per_second, 0.0);
}

TEST(RunReport, InvalidReportsAreRefused) {
  const auto refused = [](auto change) {
    RunReport run = synthetic_run(test::seed(), {2, 8, 3});
    validate(run);
    change(run);
    EXPECT_THROW(validate(run), UsageError);
  };
  refused([](RunReport& r) { r.workload.steps = 0; });
  refused([](RunReport& r) { r.configuration.ranks = 3; });
  refused([](RunReport& r) { r.configuration.top_k = 0; });
  refused([](RunReport& r) { r.times.pop_back(); });
  refused([](RunReport& r) { r.combine.traffic_bytes.push_back(0); });
  refused([](RunReport& r) { r.load.rows_per_rank[1] = -1; });
  refused([](RunReport& r) { r.load.rank_of_expert[0] = -1; });
  refused([](RunReport& r) {
    std::swap(r.times[2][StepStage::experts].begin_us, r.times[2][StepStage::experts].end_us);
  });
  refused(
      [](RunReport& r) { r.times[2][StepStage::experts].end_us = std::numeric_limits<double>::quiet_NaN(); });
}

}  // namespace
}  // namespace ferry::report
