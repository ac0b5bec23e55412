// Experts in slices in CUDA graphs: replays read N and the ids anew. What they give is compared on the device
// with eager calls, which the contract tests compare with the oracle.
#include "cuda/device_inputs.hpp"
#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

constexpr int kTp = 2;

// A rank's arguments in one replay, and the expected results.
struct SlicedSet {
  SlicedSet(const oracle::RankInputs& in, const Config& config, std::int64_t rows, int groups)
      : inputs(in, config),
        received(rows * 2 * config.hidden),
        received_weight(rows * 4),
        counts(groups * 4),
        row_offsets((groups + 1) * 4),
        result(std::int64_t{config.max_tokens} * 2 * config.hidden) {}

  DeviceInputs inputs;
  DeviceBytes received, received_weight, counts, row_offsets, result;
};

class CudaSliced : public DeviceTest {
 protected:
  static TestCase sliced_case(std::uint64_t number, int ep) {
    TestCase c = device_case(number, ep);
    c.config.experts = 8;
    c.config.alignment = 4;
    c.config.zero_padding = true;
    c.config.deadline = 4;
    return c;
  }

  static void replay_often(const TestCase& c) {
    constexpr int kSets = 6;
    const int replays = number_from_environment("FERRY_REPLAYS", 10000);
    Config config = c.config;
    config.placement = Placement::ep_tp(config.experts, c.ranks, kTp);
    run(c.ranks * kTp, c, [&](Rank rank) {
      ferry::Exchange exchange(rank, config);
      const std::int64_t most = config.max_tokens, row_bytes = 2 * config.hidden;
      const int groups = config.experts / c.ranks;
      const DeviceInputs inputs(config);
      const DeviceBytes received(exchange.capacity() * row_bytes), received_weight(exchange.capacity() * 4),
          counts(groups * 4), row_offsets((groups + 1) * 4), result(most * row_bytes);
      const TestStream stream;
      const auto poison = [&] {
        received.poison(stream.get());
        received_weight.poison(stream.get());
        result.poison(stream.get());
      };
      const auto call = [&](const Tokens& of) {
        const CallOptions on{.stream = {stream.get()}};
        DispatchOptions options{.call = on};
        options.memory.parts[0] = received.data();
        options.memory.weight = received_weight.as<float>();
        options.memory.counts = counts.as<std::int32_t>();
        options.memory.row_offsets = row_offsets.as<std::int32_t>();
        const DispatchResult rows = exchange.dispatch(of, inputs.ids(), inputs.weights(), options);
        exchange.combine({.data = rows.data}, rows.plan, {.data = result.data()},
                         {.call = on, .row_weights = rows.weight});
      };
      std::vector<SlicedSet> sets;
      for (int index = 0; index < kSets; ++index) {
        const StepInputs step = make_inputs(c, index);
        const SlicedSet& set =
            sets.emplace_back(step.inputs.ranks[static_cast<std::size_t>(rank.index() / kTp)], config,
                              exchange.capacity(), groups);
        inputs.load(set.inputs, stream.get());
        poison();
        call(inputs.tokens_of(set.inputs));
        exchange.synchronize({.stream = {stream.get()}});
        set.received.copy_from(received, stream.get());
        set.received_weight.copy_from(received_weight, stream.get());
        set.counts.copy_from(counts, stream.get());
        set.row_offsets.copy_from(row_offsets, stream.get());
        set.result.copy_from(result, stream.get());
      }
      stream.synchronize();
      rank.barrier();
      const Graph graph(stream.get(), [&] {
        poison();
        call(inputs.counted_tokens());
      });
      rank.barrier();
      DeviceComparison comparison;
      for (int number = 0; number < replays; ++number) {
        const SlicedSet& set = sets[static_cast<std::size_t>(number % kSets)];
        inputs.load(set.inputs, stream.get());
        graph.launch(stream.get());
        ArrayPairs pairs;
        pairs.add(received.data(), set.received.data(), received.bytes());
        pairs.add(received_weight.data(), set.received_weight.data(), received_weight.bytes());
        pairs.add(counts.data(), set.counts.data(), counts.bytes());
        pairs.add(row_offsets.data(), set.row_offsets.data(), row_offsets.bytes());
        pairs.add(result.data(), set.result.data(), result.bytes());
        comparison.compare(pairs, number, stream.get());
        // A launch on a full stream blocks inside the driver, where ranks that share a device could deadlock.
        if (number % 50 == 49) stream.synchronize();
      }
      comparison.require_no_difference(stream.get(), {"rows", "weight", "counts", "row_offsets", "result"});
      exchange.check();
    });
  }
};

TEST_F(CudaSliced, ReplaysReadCurrentTokensAndIds) {
  replay_often(sliced_case(1, 2));
}

TEST_F(CudaSliced, ReplaysOfManyTokens) {
  TestCase c = sliced_case(2, 1);
  c.config.max_tokens = 300;
  replay_often(c);
}

}  // namespace
}  // namespace ferry::contract
