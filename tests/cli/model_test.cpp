// The cost model: its loads against counts by hand and exact expectations, its formula against sums by hand,
// and its errors on every record that it was not calibrated on.
#include "tools/ferry/model/cost.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "tools/ferry/model/calibration.hpp"

namespace ferry::app {
namespace {

namespace fs = std::filesystem;

const fs::path kResults = FERRY_RESULTS;

// ---- loads

// Four ranks on two nodes, one expert each, one token each: rank 0 to experts 0 and 1, rank 1 to 2 and 3,
// rank 2 to 3 and a masked slot, rank 3 to 0 and 1.
Loads loads_by_hand() {
  Trace trace;
  trace.name = "by hand";
  trace.layers = 1;
  trace.tokens = 4;
  trace.top_k = 2;
  trace.experts = 4;
  trace.ids = {0, 1, 2, 3, 3, -1, 0, 1};
  trace.weights.assign(trace.ids.size(), 0.5f);
  return trace_loads({.ranks = 4, .nodes = 2, .tokens = 1, .experts = 4, .top_k = 2}, trace);
}

TEST(ModelLoads, AreThoseOfTheBusiestRank) {
  const Loads loads = loads_by_hand();
  EXPECT_EQ(loads.own, 0.25);     // rank 0's token
  EXPECT_EQ(loads.near, 1);       // rank 0 to 1, rank 2 to 3
  EXPECT_EQ(loads.far, 2);        // rank 1 to 2 and 3, rank 3 to 0 and 1
  EXPECT_EQ(loads.far_nodes, 1);  // rank 1 to the relay 3, rank 3 to the relay 1
  EXPECT_EQ(loads.forwarded, 1);  // rank 3 on to 2, rank 1 on to 0
  EXPECT_EQ(loads.far_routes, 2);
  EXPECT_EQ(loads.routes, 2);  // every rank but 2 receives two
}

TEST(ModelLoads, ExpectedGroupsAreExact) {
  EXPECT_DOUBLE_EQ(expected_groups(4, 2, 2), 5.0 / 3);  // of six pairs, two in one group and four in two
  EXPECT_DOUBLE_EQ(expected_groups(8, 1, 3), 3);
  EXPECT_DOUBLE_EQ(expected_groups(8, 8, 3), 1);
}

TEST(ModelLoads, OfUniformRoutingAreNearTheExpectation) {
  const RoutingShape shape{.ranks = 32, .nodes = 4, .tokens = 4096, .experts = 256, .top_k = 8};
  const Loads loads = uniform_loads(shape);
  const double ranks = expected_groups(256, 8, 8) * 4096, nodes = expected_groups(256, 64, 8) * 4096;
  EXPECT_NEAR(loads.own / (ranks / 32), 1, 0.01);
  // The busiest of 32 ranks has a few standard deviations more than the mean.
  const auto is_a_little_more = [](double busiest, double mean) {
    EXPECT_GE(busiest, mean);
    EXPECT_LE(busiest, mean * 1.03);
  };
  is_a_little_more(loads.near, ranks * 7 / 32);
  is_a_little_more(loads.far, ranks * 24 / 32);
  is_a_little_more(loads.far_nodes, nodes * 3 / 4);
  is_a_little_more(loads.routes, 4096 * 8);
}

TEST(ModelLoads, OfMoreTokensThanAreDrawnGrowWithTheTokens) {
  RoutingShape shape{.ranks = 512, .nodes = 64, .tokens = 1024, .experts = 512, .top_k = 8};
  const Loads few = uniform_loads(shape);
  shape.tokens = 16384;
  const Loads many = uniform_loads(shape);
  EXPECT_NEAR(many.own / few.own, 16, 1.5);
  EXPECT_NEAR(many.far / few.far, 16, 1);
}

TEST(ModelLoads, AreThoseOfTheRecords) {
  int compared = 0;
  for (const MeasuredPoint& point : read_bench(kResults / "2026-11-22-4xh200-bench-skew.json").points) {
    const RoutingShape& shape = point.call.shape;
    if (shape.tokens != 4096 || !point.router.starts_with("synth:decode")) continue;
    const Loads loads = trace_loads(shape, open_trace(point.router));
    EXPECT_NEAR(loads.near / point.loads.near, 1, 0.01);
    EXPECT_NEAR(loads.routes / point.loads.routes, 1, 0.01);
    EXPECT_NEAR(loads.own / point.loads.own, 1, 0.01);
    ++compared;
  }
  EXPECT_GT(compared, 0);
}

// ---- formula

class ModelCost : public testing::Test {
 protected:
  ModelCost() {
    // Nothing but what a test sets takes time.
    for (const ConstantEntry& entry : constant_table())
      constants_[entry.constant] = std::string(entry.unit) == "us" ? 1e-9 : 1e9;
    limits_.gpus.assign(4, "GPU");
    limits_.ranks = 4;
    limits_.push = {{1, 50e9}, {100, 200e9}};
    limits_.flag_seconds = 1e-6;
    call_.shape = {.ranks = 4, .nodes = 1, .tokens = 1024, .experts = 256, .top_k = 8};
    call_.hidden = 5000;  // 10,000 bytes
    loads_ = {.own = 100, .near = 1000, .near_routes = 2000, .routes = 4000};
  }

  double total() const { return cost_of(call_, loads_, constants_, limits_, network_).total; }

  Constants constants_;
  GpuLimits limits_;
  ModelCall call_;
  Loads loads_;
  Network network_{.name = "test", .bytes_per_second = 10e9, .latency_us = 5, .messages_per_second = 1e6};
};

TEST_F(ModelCost, TheLinkCarriesTheBusiestRanksMessages) {
  EXPECT_NEAR(total(), 1000 * 10000 / 200e9 * 1e6, 0.01);
  call_.call.sm_limit = 10;  // whose best push rate is that of one SM
  EXPECT_NEAR(total(), 1000 * 10000 / 50e9 * 1e6, 0.01);
  call_.format = Format::fp32();
  EXPECT_NEAR(total(), 1000 * 20000 / 50e9 * 1e6, 0.01);
  call_.call = {.work = Work::combine, .reduction = Reduction::exact};
  EXPECT_NEAR(total(), 2000 * 20000 / 200e9 * 1e6, 0.01);
}

TEST_F(ModelCost, SmsStoreTheRowsThatArrive) {
  constants_[Constant::store] = 40;
  limits_.push = {{100, 1e18}};
  EXPECT_NEAR(total(), 4000 * 10000 / 40e9 / 100 * 1e6, 0.01);
  call_.layout = Layout::rank_major;
  EXPECT_NEAR(total(), 1100 * 10000 / 40e9 / 100 * 1e6, 0.01);
  call_.call.sm_limit = 10;
  EXPECT_NEAR(total(), 1100 * 10000 / 40e9 / 10 * 1e6, 0.01);
}

TEST_F(ModelCost, RanksThatShareAGpuShareItsSmsAndMemory) {
  constants_[Constant::store] = 40;
  limits_.push = {{100, 1e18}};
  const double alone = total();
  limits_.gpus.resize(1);
  EXPECT_NEAR(total(), 4 * alone, 0.01);
}

TEST_F(ModelCost, StepsOfFewTokensFollowOneAnotherAndThoseOfManyOverlap) {
  constants_[Constant::store] = 4000.0 / 1000 * 200 / 100;  // as long as the link
  const double link = 50;
  EXPECT_NEAR(total(), link * std::pow(2, 0.25), 0.01);
  call_.shape.tokens = 255;
  EXPECT_NEAR(total(), link * 2, 0.01);
}

TEST_F(ModelCost, StartsDependOnTheCall) {
  limits_.push = {{100, 1e18}};
  constants_[Constant::dispatch_few] = 1;
  constants_[Constant::dispatch_many] = 2;
  constants_[Constant::combine_ll] = 3;
  constants_[Constant::combine_few] = 4;
  constants_[Constant::combine_many] = 5;
  constants_[Constant::doubling] = 0.1;  // four ranks: twice
  constants_[Constant::plan] = 10;
  constants_[Constant::phases] = 100;
  constants_[Constant::eager] = 1000;
  call_.hidden = 7168;
  const auto time_of = [&](TimedCall call, int tokens) {
    call_.call = call;
    call_.shape.tokens = tokens;
    return total();
  };
  EXPECT_NEAR(time_of({.work = Work::dispatch}, 255), 1.2, 0.01);
  EXPECT_NEAR(time_of({.work = Work::dispatch}, 256), 2.2, 0.01);
  EXPECT_NEAR(time_of({.work = Work::combine}, 10), 3.2, 0.01);  // 10 tokens times 3 other ranks
  EXPECT_NEAR(time_of({.work = Work::combine}, 11), 4.2, 0.01);
  EXPECT_NEAR(time_of({.work = Work::combine, .reduction = Reduction::exact}, 10), 4.2, 0.01);
  EXPECT_NEAR(time_of({.work = Work::combine}, 256), 5.2, 0.01);
  EXPECT_NEAR(time_of({.work = Work::dispatch_plan}, 1), 11.2, 0.01);
  EXPECT_NEAR(time_of({.work = Work::dispatch, .in_phases = true}, 1), 101.2, 0.01);
  EXPECT_NEAR(time_of({.work = Work::dispatch, .eager = true}, 1), 1001.2, 0.01);
  EXPECT_NEAR(time_of({.work = Work::dispatch, .eager = true, .in_phases = true}, 1), 2101.2, 0.01);
  EXPECT_NEAR(time_of({.work = Work::pair}, 1), 1.2 + 3.2, 0.01);
  EXPECT_THROW(time_of({.work = Work::metadata}, 1), UsageError);
  call_.hidden /= 2;
  EXPECT_NEAR(time_of({.work = Work::combine}, 256), 4.7,
              0.01);  // half the bytes: half of combine_many - combine_few
}

TEST_F(ModelCost, OnlyFormatsThatQuantiseTakeTimeToQuantise) {
  limits_.push = {{100, 1e18}};
  constants_[Constant::fp8] = 1;
  call_.hidden = 7168;
  EXPECT_NEAR(total(), 0, 0.01);
  call_.format = Format::fp8_e4m3();
  EXPECT_NEAR(total(), 1024 / 100.0, 0.01);
  call_.hidden = 7168 * 2;
  EXPECT_NEAR(total(), 2 * 1024 / 100.0, 0.01);
}

TEST_F(ModelCost, OneHopSendsARowToEachRankAndTwoHopsOneToEachNode) {
  call_.shape.nodes = 2;
  loads_.far = 3000;
  loads_.far_nodes = 500;
  loads_.forwarded = 700;
  EXPECT_EQ(link_bytes(call_, loads_).between, 3000 * 10000);
  EXPECT_EQ(link_bytes(call_, loads_).within, 1000 * 10000);
  // Header and flag to two far ranks, at a message a microsecond.
  EXPECT_NEAR(total(), 5 + 3000 * 10000 / 10e9 * 1e6 + 4, 0.1);
  call_.hops = Hops::two;
  EXPECT_EQ(link_bytes(call_, loads_).between, 500 * 10000);
  EXPECT_EQ(link_bytes(call_, loads_).within, 1700 * 10000);
  // Two flags of the relay, and 64 messages before it forwards the first; one far node.
  const double network = 500 * 10000 / 10e9 * 1e6 + 2, link = 1700 * 10000 / 200e9 * 1e6;
  const double start = 5 + 2 + 64 * 10000 / 10e9 * 1e6;
  EXPECT_NEAR(total(), start + network * std::pow(1 + std::pow(link / network, 4), 0.25), 0.1);
  call_.shape.tokens = 128;
  EXPECT_NEAR(total(), 5 + 2 + network + link, 0.1);
}

// With several nodes a dispatch has three kernels and a combine five.
TEST_F(ModelCost, FurtherKernelsBetweenNodes) {
  constants_[Constant::phases] = 10;
  constants_[Constant::eager] = 1;
  const double before = total();
  call_.shape.nodes = 2;
  loads_.far_nodes = 1e-6;
  call_.hops = Hops::two;
  call_.shape.tokens = 128;
  const double plain = 5 + 2 + 2 + 1000 * 10000 / 200e9 * 1e6;  // a put, two flags, and header and flag
  EXPECT_NEAR(total(), plain + 2 * 10, 0.1);
  call_.call.eager = true;
  EXPECT_NEAR(total(), plain + 2 * 10 + 3 * 1, 0.1);
  call_.call.work = Work::pair;
  EXPECT_NEAR(total(), 2 * plain + 6 * 10 + 8 * 1, 0.1);
  call_.shape.nodes = 1;
  call_.call = {};
  EXPECT_NEAR(total(), before, 1e-6) << "one kernel on one node";
}

// ---- calibration

const std::vector<std::string>& calibration_records() {
  static const std::vector<std::string> names{"model/2026-11-22-4xh200.json", "model/2026-11-23-2xh200.json",
                                              "model/2026-11-24-1xh200.json", "model/2026-11-26-2xh200.json"};
  return names;
}

Model calibrated(const Constants& start) {
  std::vector<BenchRecord> records;
  for (const std::string& name : calibration_records()) records.push_back(read_bench(kResults / name));
  return calibrate(read_limits(kResults / "2026-11-22-4xh200-limits.json"), records, start);
}

// Errors at all lines of all records of `ferry bench --backend cuda` that are not in the calibration.
std::vector<PointError> left_out_errors(const Model& model, std::vector<BenchRecord>& records) {
  for (const fs::directory_entry& file : fs::directory_iterator(kResults)) {
    const std::string name = file.path().filename();
    if (name.find("h200-bench-") != std::string::npos) records.push_back(read_bench(file.path()));
  }
  std::vector<PointError> errors;
  for (const BenchRecord& record : records)
    for (const PointError& one : errors_of(model, record)) errors.push_back(one);
  return errors;
}

void expect_targets(const Model& model) {
  std::vector<BenchRecord> records;
  const ErrorSummary summary = summary_of(left_out_errors(model, records));
  EXPECT_GT(summary.points, 500u);
  EXPECT_LE(summary.median, kMedianTarget);
  EXPECT_LE(summary.worst, kWorstTarget);
}

TEST(ModelCalibration, BuiltInConstantsMeetTheTargetsOnAllPointsLeftOut) {
  expect_targets(built_in_model());
}

TEST(ModelCalibration, FindsConstantsThatMeetTheTargetsFromAFarStart) {
  Constants start;
  bool up = true;
  for (const ConstantEntry& entry : constant_table()) {
    if (entry.constant != Constant::memory) start[entry.constant] *= up ? 1.6 : 0.6;
    up = !up;
  }
  const Model model = calibrated(start);
  EXPECT_TRUE(model.kept.empty());
  expect_targets(model);
}

// From one run on four GPUs: all times on two GPUs, and the other lines on four.
TEST(ModelCalibration, FourGpusPredictTwo) {
  const Model model = calibrate(read_limits(kResults / "2026-11-22-4xh200-limits.json"),
                                {read_bench(kResults / "model/2026-11-22-4xh200.json")});
  std::vector<BenchRecord> records;
  std::vector<PointError> errors = left_out_errors(model, records);
  std::erase_if(errors, [](const PointError& one) { return one.point->call.shape.ranks != 2; });
  const ErrorSummary summary = summary_of(errors);
  EXPECT_GT(summary.points, 400u);
  EXPECT_LE(summary.median, kMedianTarget);
  EXPECT_LE(summary.worst, kWorstTarget);
}

TEST(ModelCalibration, YieldsTheBuiltInConstants) {
  const Model model = calibrated(Constants()), built_in = built_in_model();
  for (const ConstantEntry& entry : constant_table())
    EXPECT_NEAR(model.constants[entry.constant] / entry.value, 1, 0.02) << entry.name;
  ASSERT_EQ(model.calibrated.size(), built_in.calibrated.size());
  for (std::size_t i = 0; i < model.calibrated.size(); ++i)
    EXPECT_NEAR(model.calibrated[i].us / built_in.calibrated[i].us, 1, 1e-8);
  ASSERT_EQ(model.limits.push.size(), built_in.limits.push.size());
  for (std::size_t i = 0; i < model.limits.push.size(); ++i)
    EXPECT_NEAR(model.limits.push[i].second / built_in.limits.push[i].second, 1, 1e-3);
  EXPECT_NEAR(model.limits.flag_seconds, built_in.limits.flag_seconds, 1e-9);
}

// Every line of the calibration is in a record of bench/results too, and a check leaves it out.
TEST(ModelCalibration, PointsAreLeftOutOfTheCheck) {
  const Model model = built_in_model();
  std::vector<BenchRecord> records;
  const std::size_t compared = left_out_errors(model, records).size();
  std::size_t all = 0;
  for (const BenchRecord& record : records) all += record.points.size();
  EXPECT_EQ(all - compared, model.calibrated.size());
}

TEST(ModelCalibration, KeepsWhatNoPointDependsOn) {
  const Model model = calibrate(read_limits(kResults / "2026-11-22-4xh200-limits.json"),
                                {read_bench(kResults / "model/2026-11-23-2xh200.json")});
  EXPECT_NE(std::find(model.kept.begin(), model.kept.end(), "combine_ll"), model.kept.end());
  EXPECT_EQ(std::find(model.kept.begin(), model.kept.end(), "dispatch_few"), model.kept.end());
  EXPECT_EQ(model.constants[Constant::combine_ll], Constants()[Constant::combine_ll]);
}

}  // namespace
}  // namespace ferry::app
