#include "tools/report/timeline.hpp"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "report/synthetic_run.hpp"
#include "seed.hpp"

namespace ferry::report {
namespace {

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
