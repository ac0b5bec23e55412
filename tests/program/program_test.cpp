// Programs as values: what check() refuses, the text form, the picture.
#include "ferry/program.hpp"

#include <gtest/gtest.h>
#include <pthread.h>

#include <functional>
#include <random>
#include <string>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "refusal.hpp"
#include "repeats.hpp"
#include "seed.hpp"

namespace ferry::test {
namespace {

std::string layer_of(const std::string& steps) {
  return "program moe\ninput x: tokens\ninput ids: ids\ninput w: weights\ninput n: count\n" + steps;
}

// The error of parse_program() for these steps, after "program moe, ".
std::string fault_of(const std::string& steps) {
  const std::string found = refusal([&] { parse_program(layer_of(steps)); });
  const std::string prefix = "program moe, ";
  return found.rfind(prefix, 0) == 0 ? found.substr(prefix.size()) : found;
}

constexpr const char* kRows = "rows = dispatch(x, ids, w)\n";
constexpr const char* kOutputs = "out: outputs = call experts(rows)\n";

TEST(Program, AcceptsALayer) {
  EXPECT_EQ(fault_of(std::string(kRows) + kOutputs + "y = combine(out, rows, rows)\noutput y\n"), "accepted");
}

TEST(Program, RefusesAValueBeforeItIsMade) {
  EXPECT_EQ(fault_of(std::string(kOutputs) + kRows),
            "step out (call experts): uses rows before step rows (dispatch) makes it: move that step up");
  EXPECT_EQ(fault_of("y = combine(out, x)\n"),
            "step y (combine): uses out, which is no input and which no step makes");
}

TEST(Program, RefusesCycles) {
  EXPECT_EQ(fault_of("a: tokens = call f(b)\nb: tokens = call g(c)\nc: tokens = call h(a)\n"),
            "step a (call f): uses b of step b (call g), which needs this step: a cycle; let one of "
            "them do without the other");
  EXPECT_EQ(fault_of("a: tokens = call f(a)\n"),
            "step a (call f): uses a of step a (call f), which needs this step: a cycle; let one of "
            "them do without the other");
}

// Runs `body` in a thread with a stack of 256 KiB.
void run_on_a_small_stack(std::function<void()> body) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 256 << 10), 0);
  pthread_t thread{};
  const auto call = [](void* function) -> void* {
    (*static_cast<std::function<void()>*>(function))();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, call, &body), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

// Each step needs the next one: the way to the last is as long as the program.
TEST(Program, ALongWayBetweenStepsTakesNoStack) {
  constexpr int kSteps = 100'000;
  std::string text;
  for (int i = 0; i + 1 < kSteps; ++i) text += str("v", i, ": tokens = call f(v", i + 1, ")\n");
  const std::string end = str("v", kSteps - 1, ": tokens = call f(");
  std::string before, cycle;
  run_on_a_small_stack([&] {
    before = fault_of(text + end + "x)\n");
    cycle = fault_of(text + end + "v0)\n");
  });
  EXPECT_EQ(before, "step v0 (call f): uses v1 before step v1 (call f) makes it: move that step up");
  EXPECT_EQ(
      cycle,
      "step v0 (call f): uses v1 of step v1 (call f), which needs this step: a cycle; let one of them do "
      "without the other");
}

TEST(Program, RefusesManyStreamsOfManySteps) {
  std::string text;
  for (int i = 0; i < 9000; ++i) text += str("v", i, ": tokens = call f(x) stream=", i % 1024, "\n");
  EXPECT_EQ(fault_of(text), "streams: 1024 for 9000 steps: steps times streams are at most 8388608");
}

TEST(Program, RefusesTwoOpenCallsOnALane) {
  EXPECT_EQ(fault_of("a = dispatch_send(x, ids)\nb = metadata(n)\nc = dispatch_receive(a)\n"),
            "step b (metadata): lane 0 is between the phases of a (dispatch_send): receive that first, or "
            "use another "
            "lane");
  EXPECT_EQ(
      fault_of("a = dispatch_send(x, ids)\nb = all_gather_v(x)\nc = dispatch_receive(a)\n"),
      "step b (all_gather_v): lane 0 is between the phases of a (dispatch_send): receive that first, or "
      "use another lane");
  EXPECT_EQ(fault_of("a = dispatch_send(x, ids)\nb = dispatch_send(x, ids) lane=1\n"
                     "c = dispatch_receive(a)\nd = dispatch_receive(b)\n"),
            "accepted");
  EXPECT_EQ(fault_of("a = dispatch_send(x, ids)\nb = dispatch_send(x, ids) exchange=other\n"
                     "c = dispatch_receive(a)\nd = dispatch_receive(b)\n"),
            "accepted");
}

TEST(Program, RefusesPhasesWithoutPartner) {
  EXPECT_EQ(fault_of("a = dispatch_send(x, ids)\n"),
            "step a (dispatch_send): its receive phase is missing: add a step dispatch_receive(a)");
  EXPECT_EQ(fault_of("a = dispatch_send(x, ids)\nb = dispatch_receive(a)\nc = dispatch_receive(a)\n"),
            "step c (dispatch_receive): a has been received already: use the value that this has made");
  EXPECT_EQ(fault_of(std::string(kRows) + "b = dispatch_receive(rows)\n"),
            "step b (dispatch_receive): rows is of kind received, needed here: sent_dispatch");
  EXPECT_EQ(fault_of("a = dispatch_send(x, ids)\nb = combine_receive(a)\n"),
            "step b (combine_receive): a is of kind sent_dispatch, needed here: sent_combine");
  EXPECT_EQ(fault_of("a = dispatch_send(x, ids)\nb = dispatch_receive(a)\noutput a\n"),
            "output a: is of kind sent_dispatch: receive it and return what that makes");
}

TEST(Program, RefusesKindsThatDoNotFit) {
  EXPECT_EQ(fault_of("rows = dispatch(ids, x)\n"),
            "step rows (dispatch): ids is of kind ids, needed here: tokens");
  EXPECT_EQ(fault_of("rows = dispatch(x, w)\n"),
            "step rows (dispatch): w is of kind weights, needed here: ids or received");
  EXPECT_EQ(fault_of("rows = dispatch(x)\n"), "step rows (dispatch): takes 1 values, needs 2 or 3");
  EXPECT_EQ(fault_of("m = metadata(n, n)\n"), "step m (metadata): takes 2 values, needs 1");
  EXPECT_EQ(fault_of("a = join()\n"), "step a (join): takes 0 values, needs 1 or more");
  EXPECT_EQ(fault_of("a = wait(x)\n"), "step a (wait): x is not made by an exchange: nothing to wait for");
  EXPECT_EQ(fault_of("a = all_gather_v(n)\n"),
            "step a (all_gather_v): n is of kind count, needed here: tokens, ids or weights");
  EXPECT_EQ(fault_of("a = reduce_scatter_v(x)\n"), "step a (reduce_scatter_v): takes 1 values, needs 2");
  EXPECT_EQ(fault_of("a = reduce_scatter_v(w, x)\n"),
            "step a (reduce_scatter_v): w is of kind weights, needed here: tokens");
  EXPECT_EQ(
      fault_of(std::string(kRows) + "a = reduce_scatter_v(x, rows)\n"),
      "step a (reduce_scatter_v): rows is of kind received, needed here: tokens, ids, weights or count");
  EXPECT_EQ(fault_of("a: received = call f(x)\n"),
            "step a (call f): a is of kind received: functions make tokens, ids, weights, outputs or count");
  EXPECT_EQ(fault_of("input m: metadata\n"),
            "input m: is of kind metadata: inputs are tokens, ids, weights or count");
}

TEST(Program, RefusesRowsThatALaterDispatchHasOverwritten) {
  const std::string two = std::string(kRows) + "more = dispatch(x, ids)\n";
  EXPECT_EQ(fault_of(two + kOutputs),
            "step out (call experts): rows has lost its rows: step more (dispatch) has overwritten the "
            "memory of lane "
            "0; use another lane");
  EXPECT_EQ(fault_of(two + "output rows\n"),
            "output rows: has lost its rows: step more (dispatch) has overwritten the memory of lane 0; use "
            "another "
            "lane");
  const std::string by_plan = std::string(kRows) + kOutputs + "more = dispatch(x, rows)\n";
  EXPECT_EQ(fault_of(by_plan + "y = combine(out, rows)\n"), "accepted");  // reads only the plan, which stays
  EXPECT_EQ(fault_of(by_plan + "y = combine(out, rows, rows)\n"),
            "step y (combine): rows has lost its rows: step more (dispatch) has overwritten the memory of "
            "lane 0; use "
            "another lane");
  // The plan of lane 1 is used while the call of lane 0 is open.
  EXPECT_EQ(fault_of("rows = dispatch(x, ids) lane=1\n" + std::string(kOutputs) +
                     "a = combine_send(out, rows)\nb = dispatch(x, ids) lane=1\ny = combine_receive(a)\n"),
            "step y (combine_receive): a has lost its plan: step b (dispatch) has overwritten the memory of "
            "lane 1; "
            "use another lane");
}

TEST(Program, RefusesALaneOnTwoStreams) {
  EXPECT_EQ(fault_of("rows = dispatch(x, ids) stream=1\nout: outputs = call experts(rows)\n"),
            "step out (call experts): is on stream 0, but lane 0, which it uses, is on stream 1: use that "
            "stream, or another lane");
  EXPECT_EQ(fault_of("rows = dispatch(x, ids)\nmore = dispatch(x, ids) stream=1\n"),
            "step more (dispatch): is on stream 1, but lane 0, which it uses, is on stream 0: use that "
            "stream, or another lane");
  EXPECT_EQ(fault_of("rows = dispatch(x, ids)\nmore = dispatch(x, rows) lane=1 stream=1\n"),
            "step more (dispatch): is on stream 1, but lane 0, which it uses, is on stream 0: use that "
            "stream, or another lane");
  EXPECT_EQ(fault_of("sent = dispatch_send(x, ids) stream=2\na: tokens = call shared(x) stream=1\n"
                     "rows = dispatch_receive(sent) stream=2\n"),
            "accepted");
  EXPECT_EQ(fault_of("a: tokens = call f(x) stream=-1\n"),
            "step a (call f): has stream -1: streams are 0 to 1023");
}

TEST(Program, RefusesAStepAfterWhatIsNotThere) {
  EXPECT_EQ(fault_of("a: tokens = call f(x) stream=1\nb: tokens = call f(x) after=a\n"), "accepted");
  EXPECT_EQ(fault_of("b: tokens = call f(x) after=a\n"),
            "step b (call f): comes after a, which is no input and which no step makes");
  EXPECT_EQ(fault_of("b: tokens = call f(x) after=a\na: tokens = call f(x) stream=1\n"),
            "step b (call f): comes after a before step a (call f) makes it: move that step up");
  EXPECT_EQ(fault_of("b: tokens = call f(x) after=a\na: tokens = call f(x) after=b\n"),
            "step b (call f): comes after a of step a (call f), which needs this step: a cycle; let one of "
            "them do without the other");
}

TEST(Program, RefusesNamesAndFields) {
  EXPECT_EQ(fault_of(std::string(kRows) + kRows),
            "step rows (dispatch): rows exists already, made by step rows (dispatch): rename one");
  EXPECT_EQ(fault_of("x = dispatch(x, ids)\n"),
            "step x (dispatch): x exists already, as an input: rename one");
  EXPECT_EQ(fault_of("input x: ids\n"), "input x: is there twice: rename one");
  EXPECT_EQ(fault_of("output y\n"), "output y: no input has this name and no step makes it");
  EXPECT_EQ(fault_of("rows = dispatch(x, ids) lane=-1\n"),
            "step rows (dispatch): has lane -1: lanes are 0 to 63");
  EXPECT_EQ(fault_of("rows = dispatch(x, ids) lane=2147483647\n"),
            "step rows (dispatch): has lane 2147483647: lanes are 0 to 63");
  EXPECT_EQ(fault_of("a = dispatch_send(x, ids)\nb = dispatch_receive(a) lane=1\n"),
            "step b (dispatch_receive): has lane 1: it starts no call of a lane");
  EXPECT_EQ(fault_of("a = dispatch_send(x, ids)\nb = dispatch_receive(a) exchange=e\n"),
            "step b (dispatch_receive): has an exchange, e: it works on that of its input");
  EXPECT_EQ(fault_of("rows = dispatch(x, ids) sm_limit=-1\n"),
            "step rows (dispatch): has sm_limit -1: 0 is the share of its lane");
  EXPECT_EQ(fault_of("m = metadata(n) sm_limit=1\n"),
            "step m (metadata): has sm_limit 1: only dispatch, combine and their send phases have one");
  EXPECT_EQ(fault_of("a = part(x) index=2 of=2\n"), "step a (part): is part 2 of 2: i is 0 to n - 1");
  EXPECT_EQ(fault_of("a, b = dispatch(x, ids)\n"),
            "step a, b (dispatch): makes 2 values: only calls make more than one");
  EXPECT_EQ(refusal([] {
              check({.name = "moe", .inputs = {}, .steps = {{.kind = StepKind::join}}, .outputs = {}});
            }),
            "program moe, step number 0: a join makes no value: name one");
  EXPECT_EQ(
      refusal([] { check({.name = "", .inputs = {}, .steps = {}, .outputs = {}}); }),
      "program , program: its name is '': a name is a letter or _, then letters, digits, _ and ., but not "
      "program, input or output");
}

TEST(Program, TextNamesTheLineAtFault) {
  const auto fault = [](const std::string& text) { return refusal([&] { parse_program(text); }); };
  EXPECT_EQ(fault("program a\nrows = despatch(x)\n"),
            "program text, line 2: there is no kind of step 'despatch'; there are: dispatch, dispatch_send, "
            "dispatch_receive, combine, combine_send, combine_receive, metadata, call, wait, part, join, "
            "all_gather_v, reduce_scatter_v");
  EXPECT_EQ(fault("program a\n\nx = join(a b)\n"), "program text, line 3: expected ',' before 'b)'");
  EXPECT_EQ(fault("program a\nx = join(a) lane=two\n"),
            "program text, line 2: lane is 'two', expected a number up to 2147483647");
  EXPECT_EQ(
      fault("program a\nx = join(a) speed=2\n"),
      "program text, line 2: there is no attribute 'speed'; there are: exchange, lane, index, of, stream, "
      "sm_limit, after");
  EXPECT_EQ(fault("program a\nx = call f(a)\n"),
            "program text, line 2: a call says the kinds of its values: x: outputs = call ...");
  EXPECT_EQ(fault("program a\nx: tokens = join(a)\n"),
            "program text, line 2: the kind of x follows from the step: leave it out");
  EXPECT_EQ(fault("program a\nx = join(a) lane=1 lane=2\n"),
            "program text, line 2: the step has two attributes 'lane'");
  EXPECT_EQ(fault("\n"), "program text: it needs a line 'program NAME'");
  EXPECT_EQ(fault("program a\nprogram b\n"), "program text, line 2: the program has a name already");
  EXPECT_EQ(fault("program a\ninput x: tokens ids\n"),
            "program text, line 2: what is 'ids'? The line should have ended before it");
  EXPECT_EQ(fault(std::string("program a\nx = j\0in(a)", 20)),
            "program text, line 2: has a byte 0: this is no text");
  EXPECT_EQ(fault("program a\nx = join(a"), "program text, line 2: expected ',' at the end");
}

TEST(Program, TextReadsBack) {
  const std::string text =
      "program moe\ninput x: tokens\ninput ids: ids\ninput n: count\n"
      "sent = dispatch_send(x, ids) exchange=inner lane=3 sm_limit=20 after=x after=n\n"
      "m = metadata(n)\n"
      "early: outputs, w: weights = call shared.gate(x, m) exchange=inner\n"
      "rows = dispatch_receive(sent)\n"
      "ready = wait(rows)\n"
      "y = combine(early, ready, w) exchange=inner\n"
      "half = part(y) index=1 of=2\n"
      "z = join(y, half)\n"
      "all = all_gather_v(z) exchange=inner lane=1\n"
      "mine = reduce_scatter_v(all, n) lane=2\n"
      "output mine\noutput z\noutput ready\n";
  const Program program = parse_program(text);
  EXPECT_EQ(to_string(program), text);
  EXPECT_EQ(parse_program("# a comment\n\n  " + text + "\t# another\n"), program);
  EXPECT_EQ(program.steps[4].outputs[0].kind, ValueKind::received);
}

// Every text is either refused or a program that reads back.
TEST(Program, DamagedTextsAreRefusedOrReadBack) {
  const std::string whole = to_string(
      overlap(parse_program("program moe\ninput x: tokens\ninput ids: ids\nrows = dispatch(x, ids)\n"
                            "out: outputs = call experts(rows)\ny = combine(out, rows)\noutput y\n"),
              2));
  std::mt19937_64 random(seed());
  int accepted = 0;
  for (int damaged = 0; damaged < repeats(5000); ++damaged) {
    std::string text = whole;
    for (auto edits = random() % 3; edits != ~0ULL; --edits) {
      const auto at = random() % text.size();
      if (random() % 3 == 0) {
        text.erase(at, random() % 12);
      } else if (random() % 2 == 0) {
        text.insert(at, text.substr(random() % text.size(), random() % 12));
      } else {
        text[at] = static_cast<char>(random());
      }
      if (text.empty()) break;
    }
    try {
      const Program program = parse_program(text);
      EXPECT_EQ(parse_program(to_string(program)), program) << text;
      EXPECT_FALSE(to_svg(program).empty());
      ++accepted;
    } catch (const UsageError&) {
    }
  }
  EXPECT_GT(accepted, 0);
}

TEST(Program, PictureHasABoxForEachStep) {
  const Program program = parse_program(
      layer_of(std::string(kRows) + kOutputs + "y = combine(out, rows, rows) lane=1\noutput y\n"));
  const std::string picture = to_svg(program);
  for (const char* const part :
       {"rows (dispatch)", "out (call experts)", "y (combine)", "lane 0", "lane 1", "x: tokens", "</svg>"})
    EXPECT_NE(picture.find(part), std::string::npos) << part;
}

// Limits of configurations, found without any exchange.
TEST(Program, CheckRefusesWhatConfigurationsCannotDo) {
  const Config host{.experts = 4, .top_k = 1, .hidden = 8, .max_tokens = 4};
  Config device = host;
  device.backend = BackendKind::cuda;
  const auto fault = [](const std::string& steps, const ProgramConfigs& configs) {
    try {
      check(parse_program(layer_of(steps)), configs);
    } catch (const Error& error) {
      return std::string(to_string(error.code())) + ": " + error.what();
    }
    return std::string("accepted");
  };
  const std::string gathers = "all = all_gather_v(x)\n";
  EXPECT_EQ(fault(gathers, {{"", host}}), "accepted");
  EXPECT_EQ(fault(gathers, {{"", device}}), "accepted");
  EXPECT_EQ(fault(gathers + "part: tokens = call f(all)\nready = wait(all)\ny = reduce_scatter_v(part, x)\n" +
                      "z = reduce_scatter_v(ready, x)\n",
                  {{"", device}}),
            "accepted");
  const std::string unknown =
      " has the rows of all ranks in device memory, and the host does not know how many: only functions and "
      "reduce_scatter_v take them";
  for (const auto& [step, refused] : {std::pair{"y = join(x, all)", "y (join): all"},
                                      {"y = part(all) index=0 of=2", "y (part): all"},
                                      {"y = dispatch(all, ids)", "y (dispatch): all"},
                                      {"more = all_gather_v(all)", "more (all_gather_v): all"},
                                      {"y = reduce_scatter_v(x, all)", "y (reduce_scatter_v): all"},
                                      {"ready = wait(all)\ny = join(ready)", "y (join): ready"}}) {
    EXPECT_EQ(fault(gathers + step + "\n", {{"", device}}),
              std::string("unsupported: program moe, step ") + refused + unknown);
    EXPECT_EQ(fault(gathers + step + "\n", {{"", host}}), "accepted");
  }
  EXPECT_EQ(fault("a = dispatch(x, ids)\nb = dispatch(x, ids) exchange=e\n", {{"", host}, {"e", device}}),
            "usage: program moe, step b (dispatch): its exchange has device memory, that of earlier steps "
            "host memory: a program has one kind");
  EXPECT_EQ(fault("a = dispatch(x, ids) exchange=e\n", {{"f", host}}),
            "usage: program moe, step a (dispatch): no exchange e was passed");
  EXPECT_EQ(
      fault("a = dispatch(x, ids) lane=2\n", {{"", host}}),
      "usage: program moe, step a (dispatch): lane 2 does not exist: its exchange has 1 lane; construct "
      "it with 3");
  EXPECT_EQ(fault("a = dispatch(x, w)\n", {{"", host}}),
            "usage: program moe, step a (dispatch): w is of kind weights, needed here: ids or received");
  Config sliced = host;
  sliced.placement = Placement::ep_tp(4, 2, 2);
  EXPECT_EQ(fault("a = dispatch(x, ids)\n", {{"", sliced}}), "accepted");
  const std::string lack = "its exchange has experts in slices (Placement::ep_tp), which do not have ";
  EXPECT_EQ(fault("a = dispatch_send(x, ids)\nb = dispatch_receive(a)\n", {{"", sliced}}),
            "unsupported: program moe, step a (dispatch_send): " + lack +
                "phases: take dispatch and combine in one piece");
  EXPECT_EQ(fault("a = dispatch(x, ids)\nb = dispatch(x, a)\n", {{"", sliced}}),
            "unsupported: program moe, step b (dispatch): " + lack + "a dispatch by plan: pass ids");
}

}  // namespace
}  // namespace ferry::test
