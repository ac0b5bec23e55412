// The report of a GPU benchmark, from made-up measurements.
#include "tools/ferry/bench/report.hpp"

#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace ferry::app {
namespace {

class GpuReport : public testing::Test {
 protected:
  GpuReport() {
    trace_.name = "synth:uniform:experts=16";
    trace_.experts = 16;
    trace_.top_k = 4;
    GpuLimits limits;
    limits.gpus = {"GPU"};
    limits.ranks = 4;
    limits.push = {{4, 180e9}, {8, 340e9}, {16, 320e9}, {132, 350e9}};
    report_.limits = {limits};
  }

  GpuBenchRow row(const TimedCall& call) const {
    GpuBenchRow row;
    row.point.trace = &trace_;
    row.point.ranks = 4;
    row.point.tokens = 128;
    row.point.config.experts = 16;
    row.point.config.top_k = 4;
    row.point.launches = 20;
    row.point.repetitions = 50;
    row.call = call;
    row.times.seconds = {.p50 = 20e-6, .p99 = 25e-6};
    row.times.wire_bytes = 3.4e6;
    row.times.lower_bound_bytes = 3.4e6;
    row.times.rows_checked = 7;
    return row;
  }

  nlohmann::ordered_json json_of(const GpuBenchRow& row) {
    report_.add({row});
    return gpu_bench_json(report_)["rows"].back();
  }

  Trace trace_;
  GpuBenchReport report_;
};

TEST_F(GpuReport, TheLowerBoundUsesTheBestPushWithAtMostTheCallsSms) {
  EXPECT_DOUBLE_EQ(json_of(row({.sm_limit = 16}))["push_bytes_per_second"], 340e9);
  EXPECT_DOUBLE_EQ(json_of(row({.sm_limit = 7}))["push_bytes_per_second"], 180e9);
  const nlohmann::ordered_json all = json_of(row({.sm_limit = 0}));
  EXPECT_DOUBLE_EQ(all["push_bytes_per_second"], 350e9);
  EXPECT_NEAR(all["lower_bound_us"], 3.4e6 / 350e9 * 1e6, 1e-9);
  EXPECT_NEAR(all["ratio_to_lower_bound"], 20 / (3.4e6 / 350e9 * 1e6), 1e-9);
  EXPECT_NEAR(all["wire_bytes_per_second"], 170e9, 1);
}

TEST_F(GpuReport, EveryRowDescribesItsCall) {
  const nlohmann::ordered_json json =
      json_of(row({.work = Work::pair, .reduction = Reduction::exact, .weighted = true, .sm_limit = 8}));
  for (const char* key : {"work",
                          "ranks",
                          "tokens",
                          "hidden",
                          "experts",
                          "top_k",
                          "format",
                          "layout",
                          "router",
                          "router_source",
                          "routes",
                          "pairs",
                          "remote_pairs",
                          "busiest_share",
                          "sets",
                          "launches",
                          "reduction",
                          "form",
                          "weights",
                          "sm_limit",
                          "launch",
                          "replays",
                          "rows_checked",
                          "p50_us",
                          "p99_us",
                          "wire_bytes",
                          "wire_bytes_per_second",
                          "lower_bound_bytes",
                          "lower_bound_us",
                          "ratio_to_lower_bound",
                          "push_bytes_per_second",
                          "host_us"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_EQ(json["work"], "pair");
  EXPECT_EQ(json["reduction"], "exact");
  EXPECT_EQ(json["launch"], "graph");
  EXPECT_TRUE(json["host_us"].is_null());
}

TEST_F(GpuReport, HostTimesAreThoseOfEagerCalls) {
  GpuBenchRow eager = row({.eager = true});
  eager.times.host_seconds = 4e-6;
  EXPECT_NEAR(json_of(eager)["host_us"], 4, 1e-9);
}

TEST_F(GpuReport, CallsWithoutRemoteBytesHaveNoRatio) {
  GpuBenchRow counts = row({.work = Work::metadata});
  counts.times.lower_bound_bytes = 0;
  EXPECT_TRUE(json_of(counts)["ratio_to_lower_bound"].is_null());
}

TEST_F(GpuReport, SkippedCallsHaveAReasonAndNoTimes) {
  GpuBenchRow skipped = row({.work = Work::nccl, .eager = true});
  skipped.times = {};
  skipped.times.skipped = "no such library";
  const nlohmann::ordered_json json = json_of(skipped);
  EXPECT_EQ(json["skipped"], "no such library");
  EXPECT_FALSE(json.contains("p50_us"));
  EXPECT_NE(lines_of(report_.rows.back()).lines.find("skipped: no such library"), std::string::npos);
}

TEST_F(GpuReport, RowsOfAPointStandBelowOneHeading) {
  const BenchLines dispatch = lines_of(row({.work = Work::dispatch, .weighted = true})),
                   combine = lines_of(row({.work = Work::combine, .sm_limit = 8}));
  EXPECT_EQ(dispatch.heading, combine.heading);
  EXPECT_NE(dispatch.heading.find("4 ranks, synth:uniform, E 16, K 4; bf16, expert_major\n"),
            std::string::npos);
  EXPECT_TRUE(dispatch.lines.starts_with("dispatch  ")) << dispatch.lines;
  EXPECT_TRUE(combine.lines.starts_with("combine, no weights  ")) << combine.lines;
  EXPECT_NE(dispatch.lines.find("170 GB/s"), std::string::npos) << dispatch.lines;
}

TEST_F(GpuReport, ThePercentileHasAColumnWhereItWasMeasured) {
  GpuBenchRow few = row({.work = Work::dispatch});
  EXPECT_NE(lines_of(few).heading.find(" p99 "), std::string::npos);
  few.times.seconds.p99.reset();
  EXPECT_EQ(lines_of(few).heading.find(" p99 "), std::string::npos);
  EXPECT_EQ(lines_of(few).lines.find("25.0 us"), std::string::npos);
}

TEST_F(GpuReport, TheTableFits100Columns) {
  GpuBenchRow longest = row({.work = Work::dispatch_plan, .weighted = true, .eager = true, .sm_limit = 132});
  longest.point.tokens = 131'072;
  longest.times.seconds = {.p50 = 99.9e-3, .p99 = 99.9e-3};
  longest.times.lower_bound_bytes = 340e9 * 12.3e-3;
  longest.times.host_seconds = 12.3e-3;
  const GpuBenchRow& added = report_.add({longest}).front();
  std::istringstream lines(lines_of(added).heading + lines_of(added).lines);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100U) << line;
}

}  // namespace
}  // namespace ferry::app
