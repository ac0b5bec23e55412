// The texts of reports: summary, comparison, tables and timeline.
#include "tools/report/summary.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <tuple>

#include "ferry/error.hpp"
#include "report/synthetic_run.hpp"
#include "seed.hpp"
#include "tools/report/forms.hpp"
#include "tools/report/units.hpp"

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

// ---- A run beside an earlier one: the settings that differ, and the ratios of the figures.

using Json = nlohmann::ordered_json;

Json compared(RunReport run, const RunReport& earlier) {
  run.compared_with = std::make_shared<const RunReport>(earlier);
  return to_json(run).at("compared");
}

std::string line_with(const std::string& table, const std::string& beginning) {
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(beginning)) return line;
  }
  return "no line begins with " + beginning;
}

TEST(Comparison, OfARunWithItselfHasNoDifferencesAndRatiosOfOne) {
  const RunReport run = synthetic_run(test::seed());
  const Json json = compared(run, run);
  EXPECT_EQ(json["differences"], Json::array());
  const Json ratios = json["ratios"].flatten();
  for (const auto& [path, ratio] : ratios.items()) EXPECT_EQ(ratio, 1.0) << path;
  EXPECT_FALSE(to_json(run).contains("compared"));
}

TEST(Comparison, ListsEachChangedSettingWithBothValues) {
  const RunReport earlier = synthetic_run(test::seed());
  RunReport run = earlier;
  run.workload.tokens_per_rank = 64;
  run.workload.seed.reset();
  run.configuration.format = "fp8";
  run.machine.memory_bytes = 1 << 30;
  run.machine.memcpy_bytes_per_second *= 2;  // measured, no setting
  const Json expected = {
      {{"field", "workload.seed"}, {"earlier", std::to_string(*earlier.workload.seed)}, {"now", nullptr}},
      {{"field", "workload.tokens_per_rank"}, {"earlier", 128}, {"now", 64}},
      {{"field", "configuration.format"}, {"earlier", "bf16"}, {"now", "fp8"}},
      {{"field", "machine.memory_bytes"}, {"earlier", 8'340'000'000}, {"now", 1 << 30}}};
  EXPECT_EQ(compared(run, earlier)["differences"], expected);
}

TEST(Comparison, DividesTheFiguresOfBothRuns) {
  const RunReport run = synthetic_run(test::seed()), earlier = synthetic_run(test::seed() + 1, {4, 64, 30});
  const Json now = to_json(run).flatten(), before = to_json(earlier).flatten();
  const Json json = compared(run, earlier);
  EXPECT_EQ(json["command"], earlier.command);
  const Json figures = json["figures"].flatten(), ratios = json["ratios"].flatten();
  EXPECT_EQ(figures.size(), 16u);
  EXPECT_EQ(figures.size(), ratios.size());
  for (const auto& [path, figure] : figures.items()) {
    EXPECT_EQ(figure, before[path]) << path;
    EXPECT_DOUBLE_EQ(ratios[path], now[path].get<double>() / figure.get<double>()) << path;
  }
}

TEST(Comparison, HasNoRatioOfWhatWasNotMeasuredOrIsZero) {
  const RunReport run = synthetic_run(test::seed());
  RunReport earlier = run;
  earlier.machine.memcpy_bytes_per_second = 0;
  earlier.combine.wire_bytes = 0;
  for (std::size_t i = 0; i < earlier.combine.traffic_bytes.size(); ++i) {
    if (i % 9 != 0) earlier.combine.traffic_bytes[i] = 0;  // off the diagonal of 8 ranks
  }
  const Json json = compared(run, earlier);
  EXPECT_EQ(json["figures"]["dispatch"]["share_of_memcpy"], nullptr);
  EXPECT_EQ(json["ratios"]["dispatch"]["share_of_memcpy"], nullptr);
  EXPECT_EQ(json["figures"]["combine"]["wire_bytes"], 0);
  EXPECT_EQ(json["ratios"]["combine"]["wire_bytes"], nullptr);
}

TEST(Comparison, StandsInTheTable) {
  RunReport run = synthetic_run(test::seed());
  EXPECT_EQ(to_table(run).find("Compared"), std::string::npos);
  RunReport earlier = run;
  earlier.configuration.hops = "none";
  earlier.ferry_version = "0.0.9";
  run.compared_with = std::make_shared<const RunReport>(earlier);
  const std::string table = to_table(run);
  EXPECT_NE(table.find("\nEarlier   ferry 0.0.9, started 2026-11-21T04:00:00Z\n"
                       "          configuration.hops: none, now two\n"),
            std::string::npos)
      << table;
  EXPECT_NE(table.find("now / earlier\ndispatch p50 "), std::string::npos) << table;
}

TEST(Comparison, TakesReportsThatLeaveFieldsOut) {
  RunReport plain = synthetic_run(test::seed());
  plain.configuration.shared_experts = 0;
  RunReport other = plain;
  other.configuration.input = "replicated";
  other.configuration.shared_experts = 2;
  const Json expected = {{{"field", "configuration.input"}, {"earlier", "own"}, {"now", "replicated"}},
                         {{"field", "configuration.shared_experts"}, {"earlier", 0}, {"now", 2}}};
  EXPECT_EQ(compared(other, plain)["differences"], expected);
  EXPECT_EQ(compared(plain, other)["differences"].size(), 2u);
  EXPECT_EQ(compared(plain, other)["differences"][0]["now"], "own");
}

TEST(Comparison, JudgesRunsOfTheSameWorkOnly) {
  RunReport earlier = synthetic_run(test::seed());
  const std::string recipe = earlier.workload.recipe;
  earlier.workload.recipe = recipe + ",seed=1,block_sigma=0.3";
  const auto same = [&](auto change) {
    RunReport run = earlier;
    change(run);
    const Json json = compared(run, earlier);
    const Json verdicts = json["verdicts"].flatten();
    EXPECT_EQ(verdicts.size(), 16u);
    for (const auto& [path, verdict] : verdicts.items())
      EXPECT_EQ(verdict.is_string(), json["same_work"].get<bool>()) << path;
    return json["same_work"].get<bool>();
  };
  EXPECT_TRUE(same([&](RunReport&) {}));
  EXPECT_TRUE(same([&](RunReport& run) {
    run.workload.seed = 1234;
    run.workload.recipe = recipe + ",seed=1234,block_sigma=0.3";
    run.machine.cores = 77;
    run.configuration.format = "fp8";
  }));
  EXPECT_FALSE(same([&](RunReport& run) { run.workload.tokens_per_rank = 1; }));
  EXPECT_FALSE(same([&](RunReport& run) { ++run.configuration.hidden; }));
  EXPECT_FALSE(same([&](RunReport& run) { run.workload.recipe = recipe + ",seed=1,block_sigma=0.4"; }));
}

TEST(Comparison, TellsBetterWorseAndNoise) {
  RunReport run = synthetic_run(test::seed());
  // All of a stage's times are equal, so a change of more than 2 % is none of noise.
  const auto scaled = [&](double dispatch, double experts) {
    RunReport all = run;
    all.times.assign(
        run.times.size(),
        StepTimes{.stages = {Span{0, 1000 * dispatch}, Span{2000, 2000 + 1000 * experts}, Span{9000, 9500}}});
    return all;
  };
  const RunReport earlier = scaled(1, 1);
  run = scaled(0.5, 1.019);
  run.dispatch.wire_bytes += run.dispatch.wire_bytes / 10;
  run.compared_with = std::make_shared<const RunReport>(earlier);
  const std::string table = to_table(run);
  for (const auto& [name, word] : {std::pair{"dispatch p50", "better"},
                                   {"experts mean", "noise"},
                                   {"combine p50", "noise"},
                                   {"dispatch bandwidth", "better"},
                                   {"dispatch wire bytes", "worse"},
                                   {"combine wire bytes", "equal"}})
    EXPECT_TRUE(line_with(table, name).ends_with(std::string("  ") + word)) << table;
  run = scaled(1.03, 1);
  run.compared_with = std::make_shared<const RunReport>(earlier);
  EXPECT_TRUE(line_with(to_table(run), "dispatch p50").ends_with("  worse"));
  EXPECT_TRUE(line_with(to_table(run, true), "dispatch p50").ends_with("  \x1b[1m\x1b[31mworse\x1b[0m"));
}

TEST(Units, ThreeDigitsInTheLargestUnitReached) {
  EXPECT_EQ(in_time(0), "0.00 us");
  EXPECT_EQ(in_time(1.234), "1.23 us");
  EXPECT_EQ(in_time(12.34), "12.3 us");
  EXPECT_EQ(in_time(999.4), "999 us");
  EXPECT_EQ(in_time(999.6), "1.00 ms");
  EXPECT_EQ(in_time(9.996e3), "10.0 ms");
  EXPECT_EQ(in_time(99.96e3), "100 ms");
  EXPECT_EQ(in_time(2.5e6), "2.50 s");
  EXPECT_EQ(in_bytes(999), "999 B");
  EXPECT_EQ(in_bytes(1000), "1.00 kB");
  EXPECT_EQ(in_bytes(1.5e12), "1.50 TB");
  EXPECT_EQ(in_bytes_per_second(18.34e9), "18.3 GB/s");
  EXPECT_EQ(in_percent(0.7134), "71.3 %");
  EXPECT_EQ(in_times(1.418), "1.42 x");
  EXPECT_EQ(with_thousands(0), "0");
  EXPECT_EQ(with_thousands(-1234567), "-1,234,567");
  EXPECT_EQ(with_thousands(-123), "-123");
  EXPECT_EQ(with_thousands(1000), "1,000");
  EXPECT_EQ(counted(0, "rank"), "0 ranks");
  EXPECT_EQ(counted(1, "rank"), "1 rank");
  EXPECT_EQ(counted(2000, "rank"), "2,000 ranks");
  EXPECT_EQ(in_mean(0.3125), "0.31");
  EXPECT_EQ(in_mean(1250), "1,250");
}

TEST(Table, ShowsTheFiguresOfTheRun) {
  RunReport run = synthetic_run(test::seed(), {8, 256, 50});
  run.load.rows_per_rank = {1000, 1000, 1000, 2000, 1000, 1000, 1000, 0};
  run.times.assign(run.times.size(),
                   StepTimes{.stages = {Span{0, 1500}, Span{1500, 3500}, Span{3500, 4000}}});
  const std::string table = to_table(run);
  EXPECT_EQ(line_with(table, "dispatch"), "dispatch      1.50 ms    1.50 ms    1.50 ms    1.50 ms");
  EXPECT_EQ(line_with(table, "step"), "step          4.00 ms    4.00 ms    4.00 ms    4.00 ms");
  EXPECT_EQ(
      line_with(table, "          mean of a rank"),
      "          mean of a rank: dispatch 1.50 ms + experts 2.00 ms + combine 500 us + waiting 0.00 us = "
      "step 4.00 ms");
  EXPECT_EQ(line_with(table, "rank 3").substr(0, 32), "rank 3          2,000     2.00 x");
  EXPECT_EQ(line_with(table, "Busiest"), "Busiest   rank 3: 2.00 x the mean of 1,000 rows");
  EXPECT_EQ(line_with(table, "Checks").substr(0, 40), "Checks    passed  dispatch, bit for bit:");
}

TEST(Table, ThePercentileHasAColumnFromAHundredStepsOn) {
  EXPECT_EQ(to_table(synthetic_run(test::seed(), {2, 8, 99})).find("p99"), std::string::npos);
  const std::string table = to_table(synthetic_run(test::seed(), {2, 8, 100}));
  EXPECT_EQ(line_with(table, "Time"), "Time              p50        p90        p99        max       mean");
}

TEST(Table, CountsChecksAndColoursThem) {
  RunReport run = synthetic_run(test::seed());
  for (Check& check : run.checks) check.passed = true;
  const std::string all = fmt::format("          {0} of {0} checks passed\n", run.checks.size());
  EXPECT_NE(to_table(run).find(all), std::string::npos) << to_table(run);
  EXPECT_NE(to_table(run, true).find("\x1b[32mpassed\x1b[0m  "), std::string::npos);
  run.checks.front().passed = false;
  EXPECT_NE(to_table(run).find(
                fmt::format("          {} of {} checks passed\n", run.checks.size() - 1, run.checks.size())),
            std::string::npos);
  EXPECT_EQ(to_table(run).find('\x1b'), std::string::npos);
  EXPECT_NE(to_table(run, true).find("\x1b[1m\x1b[31mFAILED\x1b[0m  "), std::string::npos);
}

TEST(Table, SaysWhereRanksShareCores) {
  RunReport run = synthetic_run(test::seed());
  run.configuration.backend = "cpu";
  run.configuration.nodes = 1;
  run.configuration.node_of_rank.assign(run.configuration.node_of_rank.size(), 0);
  run.machine.cores = run.configuration.ranks;
  EXPECT_EQ(to_table(run).find("waiting for a core"), std::string::npos);
  --run.machine.cores;
  EXPECT_NE(to_table(run).find(" cores: times include waiting for a core\n"), std::string::npos);
  run.configuration.group = "mpi";  // mpirun gives each rank its cores
  EXPECT_EQ(to_table(run).find("waiting for a core"), std::string::npos);
}

TEST(Table, AFailedCheckShowsWhereItFailed) {
  RunReport run = synthetic_run(test::seed());
  run.checks = {{.name = "combine", .compared = 9, .wrong = 2, .detail = "first at rank 1, token 3"}};
  const std::string table = to_table(run);
  EXPECT_EQ(line_with(table, "Checks"), "Checks    FAILED  combine: 9 compared, 2 wrong");
  EXPECT_NE(table.find("first at rank 1, token 3"), std::string::npos);
}

TEST(Table, IsPlainText) {
  const std::string table = to_table(synthetic_run(test::seed()));
  EXPECT_TRUE(
      std::all_of(table.begin(), table.end(), [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); }));
  EXPECT_EQ(table.find(" \n"), std::string::npos);
}

using Json = nlohmann::ordered_json;
using SpanKey = std::tuple<int, int, int>;  // rank, stage, step

TEST(TraceEvents, HoldEverySpanOfEveryRank) {
  const RunReport run = synthetic_run(test::seed(), {5, 16, 7});
  const Json json = Json::parse(to_trace_events(run));
  std::map<SpanKey, Json> spans;
  for (const Json& event : json.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    spans[{event.at("pid"), event.at("tid"), event.at("args").at("step")}] = event;
  }

  ASSERT_EQ(spans.size(), 5u * 3u * 7u);
  for (const auto& [key, event] : spans) {
    const auto [rank, stage, step] = key;
    const Span& span = run.at(step, rank).stages.at(static_cast<std::size_t>(stage));
    EXPECT_EQ(event.at("name"), to_string(static_cast<StepStage>(stage)));
    EXPECT_NEAR(event.at("ts").get<double>(), span.begin_us, 0.0006);
    EXPECT_NEAR(event.at("dur").get<double>(), span.length_us(), 0.0006);
  }
}

TEST(TraceEvents, NameEveryRankAndStage) {
  const RunReport run = synthetic_run(test::seed(), {3, 16, 1});
  const Json json = Json::parse(to_trace_events(run));
  std::map<std::pair<int, int>, std::string> threads;
  std::map<int, std::string> processes;
  for (const Json& event : json.at("traceEvents")) {
    if (event.at("name") == "thread_name")
      threads[{event.at("pid"), event.at("tid")}] = event.at("args").at("name");
    if (event.at("name") == "process_name") processes[event.at("pid")] = event.at("args").at("name");
  }
  EXPECT_EQ(processes, (std::map<int, std::string>{{0, "rank 0"}, {1, "rank 1"}, {2, "rank 2"}}));
  EXPECT_EQ(threads.size(), 9u);
  EXPECT_EQ((threads[{2, 1}]), "experts");
}

}  // namespace
}  // namespace ferry::report
