// Replays captured calls many times, with other ids and another N each time. Every replay is compared on the
// device.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cuda/device_inputs.hpp"
#include "cuda/device_test.hpp"

namespace ferry::contract {

struct ReplayOptions {
  std::function<void(DeviceRun&)> prepare{};  // changes the options of the calls before they are captured
  std::optional<Format> as{};  // the format of the exchange, if its rows are those of the case's format
  Setup setup{BackendKind::cuda, RankKind::threads};
  std::vector<int> tokens{};  // N of the sets, each rank two sets ahead of the one before; empty: drawn
  int replays = number_from_environment("FERRY_REPLAYS", 10000);
};

// A dispatch and a combine, compared with the oracle.
inline void replay_often(const TestCase& c, const ReplayOptions& options = {}) {
  const int sets = options.tokens.empty() ? 6 : static_cast<int>(options.tokens.size());
  const auto body = [&](const Rank& rank) {
    Config config = exchange_config(c);
    config.format = options.as.value_or(config.format);
    ferry::Exchange exchange(rank, config);
    DeviceRun device_run(exchange, c);
    if (options.as) device_run.dispatch_options().format = options.as;
    if (options.prepare) options.prepare(device_run);
    add_steps(device_run, c, sets, options.tokens);
    device_run.prepare_comparisons();
    const TestStream stream;
    const Graph graph = capture_both(rank, device_run, stream.get());
    rank.barrier();
    for (int number = 0; number < options.replays; ++number) {
      device_run.load(number % sets, stream.get());
      device_run.poison_outputs(stream.get());
      graph.launch(stream.get());
      device_run.compare_on_device(number % sets, number, stream.get());
      // A launch on a full stream blocks inside the driver, where ranks that share a device could deadlock.
      if (number % 100 == 99) stream.synchronize();
    }
    device_run.require_no_difference(stream.get());
    exchange.synchronize({.lane = c.lane, .stream = stream});
    exchange.check(c.lane);
  };
  run_ranks(options.setup, c.ranks, describe(c), body, c.nodes);
}

// An array that calls write.
struct OutputArray {
  std::string name;
  const void* data;
  std::int64_t bytes;
};

// Other calls, compared with eager ones, which the contract tests compare with the oracle. `call` poisons the
// outputs and enqueues them, with N of these tokens. `outputs`: of the last call. `at`: the rank of the
// case's inputs.
template <class Exchange>
void replay_like_eager(Exchange& exchange, int at, const TestCase& c, const DeviceInputs& inputs,
                       const TestStream& stream, const std::function<void(const Tokens&)>& call,
                       const std::function<std::vector<OutputArray>()>& outputs) {
  struct Set {
    DeviceInputs inputs;
    std::vector<DeviceBytes> expected;
  };
  constexpr int kSets = 6;
  const int replays = number_from_environment("FERRY_REPLAYS", 10000);
  std::vector<Set> sets;
  for (int index = 0; index < kSets; ++index) {
    const StepInputs step = make_inputs(c, index);
    Set& set = sets.emplace_back(
        Set{DeviceInputs(step.inputs.ranks[static_cast<std::size_t>(at)], exchange.config()), {}});
    inputs.load(set.inputs, stream.get());
    call(inputs.tokens_of(set.inputs));
    exchange.synchronize({.stream = stream});
    ArrayPairs kept;
    for (const OutputArray& output : outputs())
      kept.add(set.expected.emplace_back(output.bytes).data(), output.data, output.bytes);
    copy_arrays(kept, stream.get());
  }
  stream.synchronize();
  exchange.rank().barrier();
  const Graph graph(stream.get(), [&] { call(inputs.counted_tokens()); });
  exchange.rank().barrier();
  DeviceComparison comparison;
  std::vector<std::string> names;
  for (const OutputArray& output : outputs()) names.push_back(output.name);
  for (int number = 0; number < replays; ++number) {
    const Set& set = sets[static_cast<std::size_t>(number % kSets)];
    inputs.load(set.inputs, stream.get());
    graph.launch(stream.get());
    ArrayPairs pairs;
    const std::vector<OutputArray> written = outputs();
    for (std::size_t i = 0; i < written.size(); ++i)
      pairs.add(const_cast<void*>(written[i].data), set.expected[i].data(), written[i].bytes);
    comparison.compare(pairs, number, stream.get());
    // A launch on a full stream blocks inside the driver, where ranks that share a device could deadlock.
    if (number % 50 == 49) stream.synchronize();
  }
  comparison.require_no_difference(stream.get(), names);
  exchange.check();
}

}  // namespace ferry::contract
