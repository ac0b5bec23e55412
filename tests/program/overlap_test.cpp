// overlap(): the order of steps in micro-batches, their limits, and what it refuses.
#include <gtest/gtest.h>

#include <string>

#include "ferry/program.hpp"
#include "refusal.hpp"

namespace ferry::test {
namespace {

TEST(Program, MicroBatchesTakeTurnsBeforeEachReceivePhase) {
  const Program plain = parse_program(
      "program moe\ninput x: tokens\ninput ids: ids\nrows = dispatch(x, ids)\n"
      "out: outputs = call experts(rows)\ny = combine(out, rows)\noutput y\n");
  EXPECT_EQ(to_string(overlap(plain, 2)),
            "program moe\ninput x: tokens\ninput ids: ids\n"
            "x.0 = part(x) index=0 of=2\n"
            "x.1 = part(x) index=1 of=2 stream=1\n"
            "ids.0 = part(ids) index=0 of=2\n"
            "ids.1 = part(ids) index=1 of=2 stream=1\n"
            "rows.sent.0 = dispatch_send(x.0, ids.0)\n"
            "rows.sent.1 = dispatch_send(x.1, ids.1) lane=1 stream=1 after=rows.sent.0\n"
            "rows.0 = dispatch_receive(rows.sent.0)\n"
            "out.0: outputs = call experts(rows.0)\n"
            "y.sent.0 = combine_send(out.0, rows.0)\n"
            "rows.1 = dispatch_receive(rows.sent.1) stream=1\n"
            "out.1: outputs = call experts(rows.1) stream=1 after=out.0\n"
            "y.sent.1 = combine_send(out.1, rows.1) lane=1 stream=1 after=y.sent.0\n"
            "y.0 = combine_receive(y.sent.0)\n"
            "y.1 = combine_receive(y.sent.1) stream=1\n"
            "y = join(y.0, y.1)\n"
            "output y\n");
}

// The streams of micro-batches would do the same at the same time: sends and experts take turns, over layers
// too, and nothing else waits for another micro-batch.
TEST(Program, ExpertsOfMicroBatchesTakeTurns) {
  const Program batched = overlap(
      parse_program("program moe\ninput x: tokens\ninput ids: ids\nrows = dispatch(x, ids)\n"
                    "out: outputs = call experts(rows)\ny = combine(out, rows)\nh: tokens = call mix(y)\n"
                    "more = dispatch(h, ids) after=x after=out\nout2: outputs = call experts(more)\n"
                    "z = combine(out2, more)\noutput z\n"),
      3);
  std::string found;
  for (const ProgramStep& step : batched.steps)
    for (const std::string& value : step.after) found += step.outputs.front().name + " after " + value + "\n";
  EXPECT_EQ(found,
            "rows.sent.1 after rows.sent.0\nrows.sent.2 after rows.sent.1\n"
            "out.1 after out.0\ny.sent.1 after y.sent.0\nout.2 after out.1\ny.sent.2 after y.sent.1\n"
            "more.sent.0 after out.0\nmore.sent.1 after out.1\nmore.sent.1 after more.sent.0\n"
            "more.sent.2 after out.2\nmore.sent.2 after more.sent.1\n"
            "out2.0 after out.2\nout2.1 after out2.0\nz.sent.1 after z.sent.0\n"
            "out2.2 after out2.1\nz.sent.2 after z.sent.1\n");
}

TEST(Program, MicroBatchesShareTheSmLimit) {
  const Program batched = overlap(parse_program("program moe\ninput x: tokens\ninput ids: ids\n"
                                                "rows = dispatch(x, ids) sm_limit=8\n"
                                                "out: outputs = call experts(rows)\n"
                                                "y = combine(out, rows) sm_limit=2\noutput y\n"),
                                  3);
  for (const ProgramStep& step : batched.steps) {
    const int expected = step.kind == StepKind::dispatch_send  ? 2
                         : step.kind == StepKind::combine_send ? 1
                                                               : 0;
    EXPECT_EQ(step.sm_limit, expected) << step.name();
  }
}

TEST(Program, OverlapRefusesGatheredRowsInAnotherOrder) {
  const auto fault = [](const std::string& steps) {
    return refusal([&] {
      overlap(parse_program("program moe\ninput x: tokens\nall = all_gather_v(x)\n"
                            "part: tokens = call f(all)\n" +
                            steps),
              2);
    });
  };
  EXPECT_EQ(fault("y = reduce_scatter_v(part, x)\noutput y\n"), "accepted");
  EXPECT_EQ(fault("output part\n"),
            "overlap of program moe, output part: is made of the rows of all ranks, which micro-batches "
            "gather in another order: return a reduce_scatter_v of it");
  EXPECT_EQ(fault("y = reduce_scatter_v(x, x)\noutput y\n"),
            "overlap of program moe, step y (reduce_scatter_v): x is made of no rows that the program has "
            "gathered, so it cannot be split as they are");
}

TEST(Program, OverlapRefusesWhatHasNoRowsToSplit) {
  const auto fault = [](const std::string& steps, int batches) {
    return refusal(
        [&] { overlap(parse_program("program moe\ninput x: tokens\ninput ids: ids\n" + steps), batches); });
  };
  EXPECT_EQ(fault("", 0), "overlap of program moe, batches: 0, must be 1 to 64: each has lanes of its own");
  EXPECT_EQ(fault("", 65), "overlap of program moe, batches: 65, must be 1 to 64: each has lanes of its own");
  std::string many;
  for (int i = 0; i < 5000; ++i) many += "v" + std::to_string(i) + ": tokens = call f(x)\n";
  EXPECT_EQ(fault(many, 26), "accepted");
  EXPECT_EQ(
      fault(many, 27),
      "overlap of program moe, batches: 27 for 5000 steps: steps times micro-batches are at most 131072");
  EXPECT_EQ(fault("a: tokens = call f()\noutput a\n", 2),
            "overlap of program moe, step a (call f): takes nothing, so each micro-batch would have all rows "
            "of a: pass it what it is made of, or make it an input");
  EXPECT_EQ(fault("input n: count\n", 2),
            "overlap of program moe, input n: is of kind count, which has no rows to split");
  EXPECT_EQ(fault("n: count = call f(x)\nm = metadata(n)\n", 2),
            "overlap of program moe, step m (metadata): works on all tokens of the rank at once");
  EXPECT_EQ(fault("rows = dispatch(x, ids)\noutput rows\n", 2),
            "overlap of program moe, output rows: is of kind received, only tokens are joined");
  EXPECT_EQ(fault("output x\n", 2), "overlap of program moe, output x: is an input: take it from there");
}

}  // namespace
}  // namespace ferry::test
