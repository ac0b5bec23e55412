// The evaluator: what it refuses before it runs, parts and joins, and that a run allocates nothing.
#include "ferry/evaluator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "ferry/error.hpp"
#include "program/layer_by_hand.hpp"

namespace {
thread_local long allocations = 0;  // of this thread
}

// Not inlined: the compiler would find malloc and delete, or new and free, side by side.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  return memory != nullptr ? memory : throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace ferry::test {
namespace {

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(to_string(error.code())) + ": " + error.what();
  }
  return "accepted";
}

void alone(const std::function<void(const Rank&)>& body) {
  Group::threads(1).run(body);
}

std::string compiled(const std::string& text, const Config& config,
                     const ProgramFunctions& functions = {{"experts", same_rows}}) {
  std::string found;
  alone([&](const Rank& rank) {
    Exchange exchange(rank, config);
    found = refusal([&] { Evaluator(parse_program(text), exchange, functions); });
  });
  return found;
}

TEST(Evaluator, RefusesWhatTheExchangeCannotDo) {
  EXPECT_EQ(compiled(kLayer, layer_config()), "accepted");
  EXPECT_EQ(compiled(kLayer, layer_config(), {}),
            "usage: program moe, step out (call experts): no function experts was passed: pass it in the "
            "functions of the evaluator");
  EXPECT_EQ(compiled("program moe\ninput x: tokens\ninput ids: ids\nrows = dispatch(x, ids) lane=1\n",
                     layer_config()),
            "usage: program moe, step rows (dispatch): lane 1 does not exist: its exchange has 1 lane; "
            "construct it with 2");
  Config config = layer_config();
  config.own_receive_buffers = false;
  EXPECT_EQ(compiled(kLayer, config),
            "usage: program moe, step rows (dispatch): its exchange owns no receive buffers: "
            "construct it with own_receive_buffers");
  config = layer_config();
  config.reduction = Reduction::unreduced;
  EXPECT_EQ(compiled(kLayer, config),
            "unsupported: program moe, step y (combine): its exchange does not reduce, so its results are no "
            "tokens: use the reduction partial or exact");
  config = layer_config();
  config.format = Format::raw({16});
  EXPECT_EQ(compiled(kLayer, config),
            "unsupported: program moe, step rows (dispatch): its exchange has a raw format, whose parts are "
            "no tokens "
            "value");
  const std::string split = std::string("program moe\ninput x: tokens\ninput ids: ids\ninput w: weights\n") +
                            "rows = dispatch(x, ids)\nout: outputs = call experts(rows)\n" +
                            "sent = combine_send(out, rows, w)\ny = combine_receive(sent)\n";
  EXPECT_EQ(compiled(split, layer_config()),
            "usage: program moe, step sent (combine_send): topk_weights with the reduction partial need a "
            "combine in one "
            "piece, or the reduction exact");
  alone([](const Rank& rank) {
    Exchange exchange(rank, layer_config());
    EXPECT_EQ(refusal([&] {
                Evaluator(parse_program(kLayer), ProgramExchanges{{"a", &exchange}},
                          {{"experts", same_rows}});
              }),
              "usage: program moe, step rows (dispatch): names no exchange, and no exchange without a name "
              "was passed");
  });
}

TEST(Evaluator, RefusesInputsOfOtherKindsOnEveryRank) {
  Group::threads(2).run([](const Rank& rank) {
    Exchange exchange(rank, layer_config());
    Evaluator layer(parse_program(kLayer), exchange, {{"experts", same_rows}});
    const std::vector<float> x(8, 1.0f + static_cast<float>(rank.index()));
    const std::vector<std::int64_t> ids = {3, 0};
    const auto right = {ProgramValue::tokens(x.data(), 2, DType::fp32), ProgramValue::ids(ids.data(), 2)};
    const auto few = {ProgramValue::tokens(x.data(), 2, DType::fp32)};
    const auto swapped = {ProgramValue::ids(ids.data(), 2), ProgramValue::tokens(x.data(), 2, DType::fp32)};
    const auto uneven = {ProgramValue::tokens(x.data(), 2, DType::fp32), ProgramValue::ids(ids.data(), 1)};
    const auto run = [&](const std::initializer_list<ProgramValue>& wrong) {
      return refusal([&] { layer.run(std::span(rank.index() == 0 ? wrong : right)); });
    };
    const auto expect = [&](const std::string& found, const std::string& what,
                            const std::string& prefix = "usage: program moe: ") {
      EXPECT_NE(found.find(rank.index() == 0 ? prefix + what : "failed on rank 0: " + what),
                std::string::npos)
          << found;
    };
    expect(run(few), "run() was given 1 input, the program has 2");
    expect(run(swapped), "input x is of kind ids, the program says tokens");
    expect(run(uneven), "the ids are of 1 token, the rows of 2",
           "usage: program moe, step rows (dispatch): ");
    const auto y = layer.run(std::span(right))[0];
    EXPECT_EQ(y->rows, 2);
    EXPECT_EQ(static_cast<const float*>(y->data)[7], x[0]);
  });
}

TEST(Evaluator, RefusesAValueOfAnotherKindThanTheFunctionMakes) {
  Group::threads(2).run([](const Rank& rank) {
    Exchange exchange(rank, layer_config());
    const auto wrong = [&](ProgramInputs inputs, ProgramOutputs outputs) {
      same_rows(inputs, outputs);
      if (rank.index() == 0) *outputs[0] = ProgramValue::tokens(outputs[0]->data, 0, DType::fp32);
    };
    Evaluator layer(parse_program(kLayer), exchange, {{"experts", wrong}});
    const std::vector<float> x(8, 1.0f);
    const std::vector<std::int64_t> ids = {3, 0};
    const auto inputs = {ProgramValue::tokens(x.data(), 2, DType::fp32), ProgramValue::ids(ids.data(), 2)};
    const std::string found = refusal([&] { layer.run(std::span(inputs)); });
    EXPECT_NE(found.find("the function has made tokens of a value of kind outputs: set its data and rows"),
              std::string::npos)
        << found;
  });
}

// Such an error of another group does not end this one.
TEST(Evaluator, AFunctionThatThrowsATimeoutEndsTheRunOfTheOthersAtOnce) {
  Group::threads(2).run([](const Rank& rank) {
    Config config = layer_config();
    config.deadline = 60;
    Exchange exchange(rank, config);
    bool fails = rank.index() == 0;
    const auto experts = [&](ProgramInputs inputs, ProgramOutputs outputs) {
      if (fails) throw TimeoutError("of another group", {});
      same_rows(inputs, outputs);
    };
    Evaluator layer(parse_program(kLayer), exchange, {{"experts", experts}});
    const std::vector<float> x(8, 1.0f);
    const std::vector<std::int64_t> ids = {3, 0};
    const auto inputs = {ProgramValue::tokens(x.data(), 2, DType::fp32), ProgramValue::ids(ids.data(), 2)};
    const auto begin = std::chrono::steady_clock::now();
    try {
      layer.run(std::span(inputs));
      ADD_FAILURE() << "the run has not ended with an error";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("of another group"), std::string::npos) << error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
    fails = false;
    EXPECT_EQ(layer.run(std::span(inputs))[0]->rows, 2);
  });
}

// Two exchanges, in one hop and in two, whose experts lie elsewhere; both calls of lane 0 are open at once.
TEST(Evaluator, StepsRunOnTheExchangeThatTheyName) {
  Group::threads(2, 2).run([](const Rank& rank) {
    Config wide = layer_config();
    wide.experts = 8;  // so that expert 3 is on rank 0
    wide.hops = Hops::two;
    Exchange first(rank, layer_config()), second(rank, wide);
    const Program program = parse_program(R"(
      program two
      input x: tokens
      input ids: ids
      sent = dispatch_send(x, ids) exchange=first
      other = dispatch_send(x, ids) exchange=second
      rows = dispatch_receive(sent)
      others = dispatch_receive(other)
      out: outputs = call experts(rows) exchange=first
      outs: outputs = call experts(others) exchange=second
      y = combine(out, rows) exchange=first
      z = combine(outs, others) exchange=second
      output y
      output z
    )");
    std::vector<std::int64_t> totals;
    const ProgramFunction experts = [&](auto inputs, auto outputs) {
      totals.push_back(inputs[0]->received.total[0]);
      same_rows(inputs, outputs);
    };
    Evaluator layer(program, {{"first", &first}, {"second", &second}}, {{"experts", experts}});
    const std::vector<float> x(8, 1.0f + static_cast<float>(rank.index()));
    const std::vector<std::int32_t> ids = {3, 0};
    const auto given = {ProgramValue::tokens(x.data(), 2, DType::fp32), ProgramValue::ids(ids.data(), 2)};
    for (const ProgramValue* const output : layer.run(std::span(given)))
      EXPECT_TRUE(std::equal(x.begin(), x.end(), static_cast<const float*>(output->data)));
    EXPECT_EQ(totals, (std::vector<std::int64_t>{2, rank.index() == 0 ? 4 : 0}));
  });
}

TEST(Evaluator, PartsAndJoinsInAnyOrder) {
  alone([](const Rank& rank) {
    Exchange exchange(rank, layer_config());
    const Program program = parse_program(R"(
      program parts
      input x: tokens
      a = part(x) index=0 of=2
      b = part(x) index=1 of=2
      b2: tokens = call twice(b)
      a2: tokens = call twice(a)
      y = join(a2, b2)
      z = join(b2, x, y)
      output y
      output z
    )");
    const ProgramFunction twice = [](auto inputs, auto outputs) {
      for (std::int64_t i = 0; i < outputs[0]->rows * 4; ++i)
        static_cast<float*>(outputs[0]->data)[i] =
            2 * static_cast<const float*>(inputs[0]->data)[i / 4 * 8 + i % 4];
    };
    Evaluator evaluator(program, exchange, {{"twice", twice}});
    const std::vector<float> x = {1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 2, 2,
                                  0, 0, 0, 0, 3, 3, 3, 3, 0, 0, 0, 0};  // every second row
    const auto inputs = {ProgramValue::tokens(x.data(), 3, DType::fp32, 32)};
    const auto outputs = evaluator.run(std::span(inputs));
    const auto column = [](const ProgramValue& value) {
      std::vector<float> found;
      for (std::int64_t row = 0; row < value.rows; ++row)
        found.push_back(static_cast<const float*>(value.data)[row * 4 + 3]);
      return found;
    };
    EXPECT_EQ(column(*outputs[0]), (std::vector<float>{2, 4, 6}));
    EXPECT_EQ(column(*outputs[1]), (std::vector<float>{4, 6, 1, 2, 3, 2, 4, 6}));
  });
}

// The memory of a function's outputs has room for its inputs' rows, also of joined and gathered ones.
TEST(Evaluator, FunctionsOfManyRowsHaveRoomForThem) {
  constexpr int kRanks = 3;
  Group::threads(kRanks).run([](const Rank& rank) {
    Exchange exchange(rank, layer_config());
    const Program program = parse_program(R"(
      program many
      input x: tokens
      all = all_gather_v(x)
      both = join(all, x)
      y: tokens = call same(both)
      output y
    )");
    Evaluator evaluator(program, exchange, {{"same", [](auto inputs, auto outputs) {
                                               const auto* const from =
                                                   static_cast<const float*>(inputs[0]->data);
                                               std::copy(from, from + inputs[0]->rows * 4,
                                                         static_cast<float*>(outputs[0]->data));
                                             }}});
    const std::vector<float> x(20, 1.0f + static_cast<float>(rank.index()));
    const auto four = {ProgramValue::tokens(x.data(), 4, DType::fp32)};
    const ProgramValue& y = *evaluator.run(std::span(four))[0];
    ASSERT_EQ(y.rows, (kRanks + 1) * 4);
    for (int row = 0; row < y.rows; ++row) {
      const float expected = row < kRanks * 4 ? 1.0f + static_cast<float>(row / 4) : x[0];
      EXPECT_EQ(static_cast<const float*>(y.data)[4 * row], expected) << "row " << row;
    }
  });
}

TEST(Evaluator, RefusesMoreRowsThanAFunctionHasRoomFor) {
  alone([](const Rank& rank) {
    Exchange exchange(rank, layer_config());
    Evaluator evaluator(parse_program("program many\ninput x: tokens\ny: tokens = call same(x)\noutput y\n"),
                        exchange, {{"same", [](auto, auto) { FAIL() << "called"; }}});
    const std::vector<float> x(20, 1.0f);
    const auto five = {ProgramValue::tokens(x.data(), 5, DType::fp32)};
    EXPECT_EQ(refusal([&] { evaluator.run(std::span(five)); }),
              "usage: program many, step y (call same): the function's input has 5 rows; at most 4 are "
              "possible: max_tokens of the exchange");
  });
}

TEST(Evaluator, FunctionsMayTakeTheStream) {
  alone([](const Rank& rank) {
    Exchange exchange(rank, layer_config());
    int calls = 0;
    Evaluator evaluator(parse_program(kLayer), exchange,
                        {{"experts", [&](auto inputs, auto outputs, Stream stream) {
                            EXPECT_EQ(stream.handle, nullptr);
                            ++calls;
                            same_rows(inputs, outputs);
                          }}});
    const std::vector<float> x(4, 1.0f);
    const std::vector<std::int32_t> ids = {2};
    const auto given = {ProgramValue::tokens(x.data(), 1, DType::fp32), ProgramValue::ids(ids.data(), 1)};
    EXPECT_EQ(static_cast<const float*>(evaluator.run(std::span(given))[0]->data)[3], 1.0f);
    EXPECT_EQ(calls, 1);
  });
}

TEST(Evaluator, GathersNeedDenseRows) {
  alone([](const Rank& rank) {
    Exchange exchange(rank, layer_config());
    Evaluator evaluator(parse_program("program g\ninput x: tokens\ny = all_gather_v(x)\noutput y\n"),
                        exchange);
    const std::vector<float> x(16, 1.0f);
    const auto strided = {ProgramValue::tokens(x.data(), 2, DType::fp32, 32)};
    EXPECT_EQ(
        refusal([&] { evaluator.run(std::span(strided)); }),
        "usage: program g, step y (all_gather_v): the rows are 32 bytes apart, dense rows of 16 are needed");
  });
}

// Rank 1 sends only when rank 0 has finished its shared experts: rank 0 can have run them only between its
// own send phase, whose rows are on their way, and the receive phase that waits for rank 1.
TEST(Evaluator, SharedExpertsRunWhileRowsAreOnTheirWay) {
  std::atomic<bool> shared_done = false;
  std::vector<std::string> order;  // of rank 0
  Group::threads(2).run([&](const Rank& rank) {
    Exchange exchange(rank, layer_config());
    const Program program = parse_program(R"(
      program block
      input x: tokens
      input ids: ids
      ready: tokens = call when_the_other_is_done(x)
      sent = dispatch_send(ready, ids)
      shared: tokens = call shared_experts(x)
      rows = dispatch_receive(sent)
      out: outputs = call experts(rows)
      y = combine(out, rows)
      output y
    )");
    const ProgramFunction when_the_other_is_done = [&](auto inputs, auto outputs) {
      for (int i = 0; rank.index() == 1 && !shared_done && i < 20'000; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      outputs[0]->data = inputs[0]->data;
    };
    const ProgramFunction shared_experts = [&](auto inputs, auto outputs) {
      outputs[0]->data = inputs[0]->data;
      if (rank.index() == 0) shared_done = true;
    };
    Evaluator layer(program, exchange,
                    {{"when_the_other_is_done", when_the_other_is_done},
                     {"shared_experts", shared_experts},
                     {"experts", same_rows}});
    if (rank.index() == 0)
      layer.set_observer([&](std::size_t step, Stream) {
        order.push_back(step < program.steps.size() ? program.steps[step].name() : "end");
      });
    const std::vector<float> x(4, 1.0f + static_cast<float>(rank.index()));
    const std::vector<std::int32_t> ids = {rank.index() == 0 ? 3 : 0};  // an expert of the other rank
    const auto given = {ProgramValue::tokens(x.data(), 1, DType::fp32), ProgramValue::ids(ids.data(), 1)};
    EXPECT_EQ(static_cast<const float*>(layer.run(std::span(given))[0]->data)[3], x[3]);
  });
  EXPECT_TRUE(shared_done);
  EXPECT_EQ(order, (std::vector<std::string>{"ready (call when_the_other_is_done)", "sent (dispatch_send)",
                                             "shared (call shared_experts)", "rows (dispatch_receive)",
                                             "out (call experts)", "y (combine)", "end"}));
}

// Compares with calls by hand, which allocate whatever the calls themselves allocate.
TEST(Evaluator, ARunAllocatesNothing) {
  Group::threads(2).run([](const Rank& rank) {
    Exchange exchange(rank, layer_config(4, 2));
    Evaluator layer(overlap(parse_program(kLayer), 2), exchange, {{"experts", same_rows}});
    const std::vector<float> x(16, 1.0f);
    const std::vector<std::int32_t> ids = {3, 0, 1, 2};
    const auto given = {ProgramValue::tokens(x.data(), 4, DType::fp32), ProgramValue::ids(ids.data(), 4)};
    LayerByHand calls{exchange, x, ids, 2};
    const auto counted = [](const auto& work) {
      work();  // the first run may allocate
      const long before = allocations;
      work();
      return allocations - before;
    };
    const long of_calls = counted([&] { calls.run(); }),
               of_run = counted([&] { layer.run(std::span(given)); });
    EXPECT_EQ(of_run, of_calls);
    EXPECT_EQ(static_cast<const float*>(layer.run(std::span(given))[0]->data)[15], 1.0f);
  });
}

}  // namespace
}  // namespace ferry::test
