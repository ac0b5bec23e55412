#include "tools/report/forms.hpp"

#include <gtest/gtest.h>

#include <string>

#include "ferry/error.hpp"
#include "report/synthetic_run.hpp"
#include "seed.hpp"

namespace ferry::report {
namespace {

using Json = nlohmann::ordered_json;

TEST(ReportJson, ReadsBackWhatItWrote) {
  for (const RunShape shape : {RunShape{1, 8, 1}, RunShape{3, 7, 11}, RunShape{8, 256, 40}}) {
    const RunReport run = synthetic_run(test::seed(), shape);
    const Json json = to_json(run);
    const RunReport back = from_json(Json::parse(json.dump()));
    EXPECT_EQ(back.workload.seed, run.workload.seed);  // all 64 bits
    EXPECT_EQ(back.times, run.times);
    EXPECT_EQ(back.dispatch.traffic_bytes, run.dispatch.traffic_bytes);
    EXPECT_EQ(back.combine.traffic_bytes, run.combine.traffic_bytes);
    EXPECT_EQ(back.configuration.node_of_rank, run.configuration.node_of_rank);
    EXPECT_EQ(back.load.routes_per_expert, run.load.routes_per_expert);
    EXPECT_EQ(back.load.rank_of_expert, run.load.rank_of_expert);
    EXPECT_EQ(back.checks.size(), run.checks.size());
    EXPECT_EQ(back.checks[2].error, run.checks[2].error);
    EXPECT_EQ(back.checks[0].error, std::nullopt);
    EXPECT_EQ(to_json(back).dump(), json.dump());
  }
}

TEST(ReportJson, EveryFieldOfTheReportReachesTheJson) {
  const RunReport run = synthetic_run(test::seed(), {2, 8, 3});
  const std::string before = to_json(run).dump();
  const auto changed = [&](auto change) {
    RunReport other = run;
    change(other);
    const Json json = to_json(other);
    EXPECT_NE(json.dump(), before);
    EXPECT_EQ(to_json(from_json(json)).dump(), json.dump());
  };
  changed([](RunReport& r) { r.command += " --quiet"; });
  changed([](RunReport& r) { r.started_at.clear(); });
  changed([](RunReport& r) { r.ferry_version += "9"; });
  changed([](RunReport& r) { r.workload = {.trace = "x", .seed = std::nullopt, .steps = 3}; });
  changed([](RunReport& r) { r.configuration.group += "!"; });
  changed([](RunReport& r) { r.configuration.nodes = 2; });
  changed([](RunReport& r) { r.configuration.nodes = 2, r.configuration.node_of_rank[1] = 1; });
  changed([](RunReport& r) { r.configuration.simulated_nodes = true; });
  changed([](RunReport& r) { r.configuration.hops = "two"; });
  changed([](RunReport& r) { r.configuration.input = "gathered"; });
  changed([](RunReport& r) { r.configuration.reduction_level = "node"; });
  changed([](RunReport& r) { r.configuration.expert_function.clear(); });
  changed([](RunReport& r) { r.machine.memcpy_bytes_per_second = 0; });
  changed([](RunReport& r) { r.machine.cores += 1; });
  changed([](RunReport& r) { r.checks.clear(); });
  changed([](RunReport& r) { r.checks[1].wrong += 1; });
  changed([](RunReport& r) { r.times[4][StepStage::combine].end_us += 0.001; });
  changed([](RunReport& r) { r.combine.messages += 1; });
  changed([](RunReport& r) { r.dispatch.traffic_bytes[1] += 1; });
  changed([](RunReport& r) { r.load.dropped_routes += 1; });
  changed([](RunReport& r) { r.load.rank_of_expert[7] = 0; });
}

TEST(ReportJson, WithoutAMemcpyRateThereIsNoShareOfIt) {
  RunReport run = synthetic_run(test::seed());
  EXPECT_TRUE(to_json(run)["dispatch"]["share_of_memcpy"].is_number());
  run.machine.memcpy_bytes_per_second = 0;
  EXPECT_TRUE(to_json(run)["dispatch"]["share_of_memcpy"].is_null());
}

TEST(ReportJson, InvalidUtf8IsReplaced) {
  RunReport run = synthetic_run(test::seed(), {1, 8, 1});
  run.command += "\xff\xc3";
  run.workload.trace += "\x80";
  EXPECT_EQ(to_json(run)["command"], run.command.substr(0, run.command.size() - 2) + "\uFFFD\uFFFD");
  EXPECT_NO_THROW(to_json(run).dump());
}

TEST(ReportJson, AShortenedTimelineSaysSoAndKeepsTheFigures) {
  const RunReport run = synthetic_run(test::seed(), {2, 8, 30});
  const Json whole = to_json(run);
  const Json cut = to_json(run, 4);
  EXPECT_EQ(cut["timeline"]["steps"], 4);
  EXPECT_EQ(cut["timeline"]["spans_us"].size(), 4u);
  EXPECT_EQ(cut["latency"], whole["latency"]);
  EXPECT_EQ(to_json(run, 1000).dump(), whole.dump());
  EXPECT_THROW(from_json(cut), UsageError);
}

// Version 1 had other names for two fields.
TEST(ReportJson, ReadsVersion1) {
  const Json present = to_json(synthetic_run(test::seed(), {2, 8, 3}));
  Json old = present;
  old["schema_version"] = 1;
  old["played"] = old["workload"];
  old.erase("workload");
  old["configuration"]["wire"] = old["configuration"]["combine_type"];
  old["configuration"].erase("combine_type");
  EXPECT_EQ(to_json(from_json(old)).dump(), present.dump());
  old["schema_version"] = 2;
  EXPECT_THROW(from_json(old), UsageError);
}

TEST(ReportJson, InvalidReportsAreRefused) {
  const Json right = to_json(synthetic_run(test::seed(), {2, 8, 3}));
  const auto refused = [&](auto change) {
    Json json = right;
    change(json);
    EXPECT_THROW(from_json(json), UsageError) << json.dump().substr(0, 200);
  };
  refused([](Json& j) { j = Json::array(); });
  refused([](Json& j) { j = 7; });
  refused([](Json& j) { j["schema"] = "something.else"; });
  refused([](Json& j) { j["schema_version"] = 3; });
  refused([](Json& j) { j["load"].erase("routes_per_expert"); });
  refused([](Json& j) { j["load"]["routes_per_expert"].push_back(1); });
  refused([](Json& j) { j["load"]["rank_of_expert"][3] = 2; });
  refused([](Json& j) { j["dispatch"]["traffic_bytes"][0][1] = -1; });
  refused([](Json& j) { j["dispatch"]["traffic_bytes"][1].erase(0); });
  refused([](Json& j) { j["workload"]["steps"] = "three"; });
  refused([](Json& j) { j["workload"]["seed"] = "12x"; });
  refused([](Json& j) { j["configuration"]["ranks"] = 0; });
  refused([](Json& j) { j["timeline"]["spans_us"][1][0][2][1] = 0; });
  refused([](Json& j) { j["timeline"]["spans_us"].erase(1); });
}

}  // namespace
}  // namespace ferry::report
