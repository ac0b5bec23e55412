// Which stream waits for which, on device memory.
#include "program/compiled.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ferry::test {
namespace {

// "name<waited for,..." of each step that waits, then "end<..." of what stream 0 waits for at the end.
std::vector<std::string> waits_of(const std::string& steps) {
  const Program program = parse_program("program moe\ninput x: tokens\ninput ids: ids\n" + steps);
  const StreamPlan plan = plan_streams(program);
  std::vector<std::string> found;
  const auto name = [&](int step) {
    return program.steps[static_cast<std::size_t>(step)].outputs.front().name;
  };
  const auto add = [&](const std::string& waiting, const std::vector<int>& awaited) {
    if (awaited.empty()) return;
    std::string line = waiting + "<";
    for (const int step : awaited) {
      line += (line.back() == '<' ? "" : ",") + name(step);
      EXPECT_TRUE(plan.steps[static_cast<std::size_t>(step)].awaited) << name(step);
    }
    found.push_back(line);
  };
  for (std::size_t i = 0; i < plan.steps.size(); ++i)
    add(program.steps[i].outputs.front().name, plan.steps[i].waits_for);
  add("end", plan.ends);
  return found;
}

using Waits = std::vector<std::string>;

TEST(StreamPlan, OneStreamWaitsForNothing) {
  EXPECT_EQ(waits_of("a: tokens = call f(x)\nb: tokens = call f(a)\noutput b\n"), Waits{});
}

TEST(StreamPlan, AStreamWaitsOnceForWhatItTakes) {
  EXPECT_EQ(waits_of("a: tokens = call f(x) stream=7\nb: tokens = call f(a) stream=7\n"
                     "c: tokens = call f(a, b)\nd: tokens = call f(a)\n"),
            Waits{"c<b"});  // b's end is a's too, and d's stream has waited already
  EXPECT_EQ(waits_of("a: tokens = call f(x) stream=1\nb: tokens = call f(x) stream=2\n"
                     "c: tokens = call f(a, b)\n"),
            Waits{"c<b,a"});
}

// Stream 0 learns of a's end from c, which has waited for it.
TEST(StreamPlan, AWaitCoversWhatTheOtherStreamHasWaitedFor) {
  EXPECT_EQ(waits_of("a: tokens = call f(x) stream=1\nc: tokens = call f(a) stream=2\n"
                     "d: tokens = call f(c)\ne: tokens = call f(a)\n"),
            (Waits{"c<a", "d<c"}));
}

TEST(StreamPlan, TheCallersStreamWaitsAtTheEndForWhatItHasNotTaken) {
  EXPECT_EQ(waits_of("a: tokens = call f(x) stream=1\nb: tokens = call f(a)\nc: tokens = call f(x) stream=1\n"
                     "d: tokens = call f(x) stream=2\n"),
            (Waits{"b<a", "end<c,d"}));
}

TEST(StreamPlan, AStreamWaitsForWhatItsStepComesAfter) {
  EXPECT_EQ(
      waits_of("a: tokens = call f(x) stream=1\nb: tokens = call f(x) after=a after=x\n"
               "c: tokens = call f(a)\nd: tokens = call f(x) stream=1 after=a\ne: tokens = call f(d)\n"),
      (Waits{"b<a", "e<d"}));
}

TEST(StreamPlan, MicroBatchesMeetInTheirJoin) {
  const Program batched = overlap(parse_program("program moe\ninput x: tokens\ninput ids: ids\n"
                                                "rows = dispatch(x, ids)\nout: outputs = call experts(rows)\n"
                                                "y = combine(out, rows)\noutput y\n"),
                                  3);
  const StreamPlan plan = plan_streams(batched);
  EXPECT_EQ(plan.streams, 3);
  EXPECT_TRUE(plan.ends.empty());
  for (std::size_t i = 0; i + 1 < plan.steps.size(); ++i)
    EXPECT_EQ(plan.steps[i].waits_for.size(), batched.steps[i].after.size()) << batched.steps[i].name();
  EXPECT_EQ(plan.steps.back().waits_for.size(), 2U);
}

}  // namespace
}  // namespace ferry::test
