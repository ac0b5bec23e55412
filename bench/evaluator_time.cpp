// The evaluator's own time on the host: runs of a program against the same calls made by hand, alternating.
//
//   build/release/bench/evaluator_time [ROUNDS]
//
// One rank with one token, so that the calls themselves take little. Prints JSON: medians over the rounds,
// each of kRuns runs, and own_us_per_step = (program - by hand) / steps.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "ferry/evaluator.hpp"
#include "ferry/ferry.hpp"
#include "tools/ferry/common/machine.hpp"

namespace {

using namespace ferry;

constexpr int kRuns = 200, kHidden = 16;
constexpr const char* kLayer = R"(
  program layer
  input x: tokens
  input ids: ids
  rows = dispatch(x, ids)
  out: outputs = call experts(rows)
  y = combine(out, rows)
  output y
)";

// The experts of both: they do nothing, and combine sends the received rows back.
void pass_on(ProgramInputs inputs, ProgramOutputs outputs) {
  outputs[0]->data = inputs[0]->received.data;
}

Config config_of(int lanes) {
  return {.experts = 2,
          .top_k = 1,
          .hidden = kHidden,
          .max_tokens = 4,
          .format = Format::fp32(),
          .combine_type = DType::fp32,
          .lanes = lanes};
}

template <class Work>
double us_per_run(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  for (int run = 0; run < kRuns; ++run) work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / kRuns;
}

double median_of(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

struct Measured {
  std::size_t steps = 0;
  double by_hand_us = 0, program_us = 0, own_us_per_step = 0;
};

// The calls of the layer for tokens [first, first + rows) of `inputs`, on a lane, as phases.
struct ByHand {
  Exchange& exchange;
  const std::vector<float>& x;
  const std::vector<std::int32_t>& ids;
  std::vector<float> y = std::vector<float>(4 * kHidden);

  void fused(int tokens) {
    const DispatchResult rows = exchange.dispatch(Tokens::rows(x.data(), tokens, DType::fp32), ids.data());
    exchange.combine({rows.data, DType::fp32}, rows.plan, {y.data(), DType::fp32});
  }

  void in_batches(int tokens, int batches) {
    const auto first = [&](int batch) { return batch * tokens / batches; };
    for (int lane = 0; lane < batches; ++lane)
      exchange.dispatch_send(
          Tokens::rows(x.data() + first(lane) * kHidden, first(lane + 1) - first(lane), DType::fp32),
          ids.data() + first(lane), nullptr, {.lane = lane});
    for (int lane = 0; lane < batches; ++lane) {
      const DispatchResult rows = exchange.dispatch_receive(lane);
      exchange.combine_send({rows.data, DType::fp32}, rows.plan,
                            {y.data() + first(lane) * kHidden, DType::fp32}, {.lane = lane});
    }
    for (int lane = 0; lane < batches; ++lane) exchange.combine_receive(lane);
  }
};

Measured measure(const Rank& rank, int batches, int rounds) {
  constexpr int kTokens = 2;
  Exchange exchange(rank, config_of(batches));
  const Program plain = parse_program(kLayer), program = batches > 1 ? overlap(plain, batches) : plain;
  Evaluator evaluator(program, exchange, {{"experts", pass_on}});
  const std::vector<float> x(kTokens * kHidden, 1.0f);
  const std::vector<std::int32_t> ids(kTokens, 0);
  const auto inputs = {ProgramValue::tokens(x.data(), kTokens, DType::fp32),
                       ProgramValue::ids(ids.data(), kTokens)};
  ByHand calls{exchange, x, ids};
  std::vector<double> by_hand, by_program;
  for (int round = -1; round < rounds; ++round) {  // the first is a warm-up
    const double hand =
        us_per_run([&] { batches > 1 ? calls.in_batches(kTokens, batches) : calls.fused(kTokens); });
    const double run = us_per_run([&] { evaluator.run(std::span(inputs)); });
    if (round < 0) continue;
    by_hand.push_back(hand);
    by_program.push_back(run);
  }
  Measured found{
      .steps = program.steps.size(), .by_hand_us = median_of(by_hand), .program_us = median_of(by_program)};
  found.own_us_per_step = (found.program_us - found.by_hand_us) / static_cast<double>(found.steps);
  return found;
}

void print(int batches, const Measured& found, const char* separator) {
  std::printf(
      "    {\"micro_batches\": %d, \"steps\": %zu, \"by_hand_us\": %.3f, \"program_us\": %.3f, "
      "\"own_us_per_step\": %.4f}%s\n",
      batches, found.steps, found.by_hand_us, found.program_us, found.own_us_per_step, separator);
}

void run(int rounds) {
  Group::threads(1).run([&](const Rank& rank) {
    std::printf(
        "{\n  \"what\": \"evaluator's own time on the host\",\n  \"date\": \"%s\",\n  \"machine\": {\"cpu\": "
        "\"%s\", \"cores\": %d},\n  \"rounds\": %d,\n  \"runs_per_round\": %d,\n  \"target_us_per_step\": "
        "2.0,\n"
        "  \"measured\": [\n",
        app::utc_now().c_str(), app::cpu_name().c_str(), app::cores(), rounds, kRuns);
    for (const int batches : {1, 2, 4})
      print(batches, measure(rank, batches, rounds), batches < 4 ? "," : "");
    std::printf("  ]\n}\n");
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? std::atoi(argv[1]) : 101);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
