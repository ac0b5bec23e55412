// The report of calls over an engine on GPUs, from made-up measurements.
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "tools/ferry/bench/engine_bench.hpp"

namespace ferry::app {
namespace {

class EngineReport : public testing::Test {
 protected:
  EngineReport() {
    trace_.name = "synth:uniform:experts=256";
    row_.point.trace = &trace_;
    row_.point.ranks = 2;
    row_.point.tokens = 4096;
    row_.point.repetitions = 15;
    row_.point.config.experts = 256;
    row_.point.config.top_k = 8;
    row_.point.config.hidden = 7168;
    row_.point.config.hops = Hops::two;
    row_.nodes = 2;
    row_.engine = "NCCL 2.28.9";
    row_.registers = true;
    row_.gpu = "NVIDIA H200";
    for (EngineCall* call : {&row_.dispatch, &row_.combine}) {
      call->call = {.p50 = 600e-6, .least = 590e-6, .most = 700e-6};
      call->all_to_all = {.p50 = 300e-6, .least = 290e-6, .most = 310e-6};
      call->copy = {.p50 = 200e-6, .least = 190e-6, .most = 210e-6};
      call->wire_bytes = 58.5e6;
    }
  }

  Trace trace_;
  EngineBenchRow row_;
};

TEST_F(EngineReport, TheBoundIsTheTransferAndTheCopy) {
  EXPECT_DOUBLE_EQ(row_.dispatch.bound_seconds(), 500e-6);
  EXPECT_DOUBLE_EQ(row_.dispatch.ratio(), 1.2);
  const nlohmann::ordered_json call = engine_bench_json({row_})["points"][0]["dispatch"];
  EXPECT_NEAR(call["bound_us"], 500, 1e-9);
  EXPECT_NEAR(call["ratio"], 1.2, 1e-12);
  EXPECT_NEAR(call["all_to_all"]["most_us"], 310, 1e-9);
}

TEST_F(EngineReport, WithoutATransferThereIsNoBound) {
  row_.combine.all_to_all = {};
  const nlohmann::ordered_json call = engine_bench_json({row_})["points"][0]["combine"];
  for (const char* name : {"all_to_all", "bound_us", "ratio"}) EXPECT_TRUE(call[name].is_null()) << name;
  EXPECT_NEAR(call["p50_us"], 600, 1e-9);
}

TEST_F(EngineReport, APointSaysHowItWasMeasured) {
  const nlohmann::ordered_json report = engine_bench_json({row_});
  EXPECT_EQ(report["schema"], "ferry.bench.engine");
  const nlohmann::ordered_json& point = report["points"][0];
  EXPECT_EQ(point["engine"], "NCCL 2.28.9");
  EXPECT_EQ(point["registers"], true);
  EXPECT_EQ(point["hops"], "two");
  EXPECT_EQ(point["hosts"], 2);
  EXPECT_EQ(point["rounds"], 15);
}

TEST_F(EngineReport, TheTableFits100Columns) {
  const std::string text = engine_bench_table({row_});
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100U) << line;
  EXPECT_NE(text.find("2 ranks on 2 hosts (NCCL 2.28.9, registered), NVIDIA H200, two hops"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("1.20"), std::string::npos) << text;
}

TEST_F(EngineReport, TimesOfRounds) {
  const RoundTimes times = round_times({3, 1, 2});
  EXPECT_EQ(times.p50, 2);
  EXPECT_EQ(times.least, 1);
  EXPECT_EQ(times.most, 3);
}

}  // namespace
}  // namespace ferry::app
