// Replays a captured dispatch and combine many times, with other ids and another N each time.
#pragma once

#include <functional>
#include <optional>

#include "cuda/device_test.hpp"

namespace ferry::contract {

// Compares every replay on the device. `prepare`: changes the options of the calls before they are captured.
// `as`: the format of the exchange, if its rows are those of the case's format.
inline void replay_often(const TestCase& c, const std::function<void(DeviceRun&)>& prepare = {},
                         const std::optional<Format>& as = std::nullopt) {
  constexpr int kSets = 6;
  const int replays = number_from_environment("FERRY_REPLAYS", 10000);
  run_ranks({BackendKind::cuda, RankKind::threads}, c.ranks, describe(c), [&](Rank rank) {
    Config config = exchange_config(c);
    config.format = as.value_or(config.format);
    ferry::Exchange exchange(rank, config);
    DeviceRun device_run(exchange, c);
    if (as) device_run.dispatch_options().format = as;
    if (prepare) prepare(device_run);
    add_steps(device_run, c, kSets);
    device_run.prepare_comparisons();
    const TestStream stream;
    const Graph graph = capture_both(rank, device_run, stream.get());
    rank.barrier();
    for (int number = 0; number < replays; ++number) {
      device_run.load(number % kSets, stream.get());
      device_run.poison_outputs(stream.get());
      graph.launch(stream.get());
      device_run.compare_on_device(number % kSets, number, stream.get());
      // A launch on a full stream blocks inside the driver, where ranks that share a device could deadlock.
      if (number % 100 == 99) stream.synchronize();
    }
    device_run.require_no_difference(stream.get());
    exchange.check(c.lane);
  });
}

}  // namespace ferry::contract
