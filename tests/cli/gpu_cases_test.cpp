// Which calls a benchmark sweep on GPUs times.
#include "tools/ferry/bench/sweep.hpp"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "ferry/error.hpp"
#include "tools/ferry/commands/commands.hpp"

namespace ferry::app {
namespace {

std::vector<Trace> uniform() {
  SynthSpec spec;
  spec.workload = Workload::uniform;
  spec.experts = 16;
  spec.top_k = 4;
  spec.tokens = 64;
  return {synthesise(spec)};
}

std::vector<GpuCase> cases_of(const std::string& arguments, const std::vector<Trace>& traces) {
  CLI::App app;
  BenchOptions options;
  add_bench_options(app, options);
  const bool sweeps = arguments.find("--tokens") != std::string::npos;
  app.parse("--backend cuda --hidden 256 " + arguments + (sweeps ? "" : " --tokens 8"));
  return gpu_cases(options, traces);
}

int count(const std::vector<GpuCase>& cases, Work work) {
  int sum = 0;
  for (const GpuCase& one : cases) {
    sum += static_cast<int>(
        std::count_if(one.calls.begin(), one.calls.end(), [&](const auto& w) { return w.work == work; }));
  }
  return sum;
}

class GpuCases : public testing::Test {
 protected:
  std::vector<GpuCase> cases(const std::string& arguments) const { return cases_of(arguments, traces_); }

  const std::vector<Trace> traces_ = uniform();
};

TEST_F(GpuCases, DispatchAndCombineAreTimedByDefault) {
  const std::vector<GpuCase> all = cases("");
  ASSERT_EQ(all.size(), 1U);
  const std::vector<TimedCall> expected{{.work = Work::dispatch, .weighted = true},
                                        {.work = Work::combine, .weighted = true}};
  EXPECT_EQ(all[0].calls, expected);
  EXPECT_EQ(all[0].point.launches, 20);
  EXPECT_EQ(all[0].point.repetitions, 50);
}

TEST_F(GpuCases, CallsAtTheSamePointShareAnExchange) {
  const std::vector<GpuCase> all =
      cases("--sms 0,8 --weights with,without --launch graph,eager --reduction partial,exact");
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(count(all, Work::dispatch), 2 * 2 * 2);
  EXPECT_EQ(count(all, Work::combine), 2 * 2 * 2 * 2);
  EXPECT_EQ(all[0].point.config.reduction, Reduction::exact);
}

TEST_F(GpuCases, PhasesAreTimedBesideFusedCalls) {
  const std::vector<GpuCase> all = cases("--form fused,phases --work dispatch,combine,metadata");
  EXPECT_EQ(count(all, Work::dispatch), 2);
  EXPECT_EQ(count(all, Work::combine), 2);
  EXPECT_EQ(count(all, Work::metadata), 1);
}

TEST_F(GpuCases, CombineIsTimedOncePerTypeOfRows) {
  const std::vector<GpuCase> all = cases("--format bf16,fp8,fp32 --tokens 4,8");
  EXPECT_EQ(all.size(), 6U);
  EXPECT_EQ(count(all, Work::dispatch), 6);
  EXPECT_EQ(count(all, Work::combine), 4);
}

TEST_F(GpuCases, PairsAreTimedForEveryFormat) {
  EXPECT_EQ(count(cases("--format bf16,fp8 --work pair"), Work::pair), 2);
}

TEST_F(GpuCases, RankMajorHasOneReductionAndNoWeights) {
  const std::vector<GpuCase> all =
      cases("--layout rank_major --reduction partial,exact,unreduced --weights with,without");
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(count(all, Work::dispatch), 2);
  ASSERT_EQ(count(all, Work::combine), 1);
  EXPECT_EQ(all[0].calls.back(), (TimedCall{.work = Work::combine}));
  EXPECT_THROW(cases("--layout rank_major --reduction exact --work combine"), UsageError);
}

TEST_F(GpuCases, UnreducedRowsTakeNoWeights) {
  const std::vector<GpuCase> all = cases("--reduction unreduced,exact --weights with,without --work combine");
  ASSERT_EQ(count(all, Work::combine), 3);
  EXPECT_EQ(all[0].point.config.reduction, Reduction::unreduced);
}

TEST_F(GpuCases, MetadataIsTimedOnce) {
  EXPECT_EQ(
      count(cases("--work metadata,dispatch --tokens 4,8 --format bf16,fp8 --launch graph,eager --sms 0,4"),
            Work::metadata),
      2);
}

TEST_F(GpuCases, TheBaselineIsTimedOncePerTypeAndNotPerLayout) {
  const std::vector<GpuCase> all =
      cases("--work nccl --format bf16,fp8 --layout expert_major,rank_major --sms 0,8 --launch eager");
  ASSERT_EQ(all.size(), 1U);
  const std::vector<TimedCall> expected{{.work = Work::nccl, .eager = true}, {.work = Work::nccl_rows}};
  EXPECT_EQ(all[0].calls, expected);
}

TEST_F(GpuCases, RepeatedExpertsAreConfigured) {
  EXPECT_FALSE(cases("")[0].point.config.repeats);
  std::vector<Trace> twice = uniform();
  twice[0].ids[5] = twice[0].ids[4];
  EXPECT_TRUE(cases_of("", twice)[0].point.config.repeats);
  twice[0].ids[5] = twice[0].ids[4] = -1;
  EXPECT_FALSE(cases_of("", twice)[0].point.config.repeats);
}

TEST_F(GpuCases, ProcessesAreRefused) {
  EXPECT_THROW(cases("--processes"), UsageError);
}

}  // namespace
}  // namespace ferry::app
