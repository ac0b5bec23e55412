// A run beside an earlier one: the settings that differ, and the ratios of the figures.
#include <gtest/gtest.h>

#include <memory>

#include "report/synthetic_run.hpp"
#include "seed.hpp"
#include "tools/report/json.hpp"
#include "tools/report/table.hpp"

namespace ferry::report {
namespace {

using Json = nlohmann::ordered_json;

Json compared(RunReport run, const RunReport& earlier) {
  run.compared_with = std::make_shared<const RunReport>(earlier);
  return to_json(run).at("compared");
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

}  // namespace
}  // namespace ferry::report
