// The evaluator's own time on the host: runs of a program against the same calls made by hand, alternating.
//
//   build/release/bench/evaluator_time [ROUNDS]
//
// One rank with two tokens, so that the calls themselves take little. Prints JSON: medians over the rounds,
// each of kRuns runs, and own_us_per_step = (program - by hand) / steps. Exits with 1 if that is more than
// the target.
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
#include "program/layer_by_hand.hpp"
#include "tools/ferry/common/machine.hpp"

namespace {

using namespace ferry;

constexpr int kRuns = 200, kHidden = 16, kTokens = 2;
constexpr double kTargetUs = 2.0;  // for a step

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

Measured measure(const Rank& rank, int batches, int rounds) {
  Exchange exchange(rank, test::layer_config(kHidden, batches));
  const Program plain = parse_program(test::kLayer), program = batches > 1 ? overlap(plain, batches) : plain;
  Evaluator evaluator(program, exchange, {{"experts", test::same_rows}});
  const std::vector<float> x(kTokens * kHidden, 1.0f);
  const std::vector<std::int32_t> ids(kTokens, 0);
  const auto inputs = {ProgramValue::tokens(x.data(), kTokens, DType::fp32),
                       ProgramValue::ids(ids.data(), kTokens)};
  test::LayerByHand calls{exchange, x, ids, batches};
  std::vector<double> by_hand, by_program;
  for (int round = -1; round < rounds; ++round) {  // the first is a warm-up
    const double hand = us_per_run([&] { calls.run(); });
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

// Whether the target was met.
bool run(int rounds) {
  bool met = true;
  Group::threads(1).run([&](const Rank& rank) {
    std::printf(
        "{\n  \"what\": \"evaluator's own time on the host\",\n  \"date\": \"%s\",\n  \"machine\": {\"cpu\": "
        "\"%s\", \"cores\": %d},\n  \"rounds\": %d,\n  \"runs_per_round\": %d,\n  \"target_us_per_step\": "
        "%.1f,\n"
        "  \"measured\": [\n",
        app::utc_now().c_str(), app::cpu_name().c_str(), app::cores(), rounds, kRuns, kTargetUs);
    for (const int batches : {1, 2, 4}) {
      const Measured found = measure(rank, batches, rounds);
      print(batches, found, batches < 4 ? "," : "");
      met = met && found.own_us_per_step <= kTargetUs;
    }
    std::printf("  ]\n}\n");
  });
  return met;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::atoi(argv[1]) : 101) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
