// MAX's calls in CUDA graphs: replays read N and the ids anew. What they give is compared on the device with
// eager calls, which the contract tests compare with the oracle.
#include "ferry/max.hpp"
#include "cuda/device_inputs.hpp"
#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

// A rank's arguments in one replay, and the expected results.
struct MaxSet {
  MaxSet(const oracle::RankInputs& in, const Config& config, int groups, int ranks)
      : inputs(in, config),
        row_offsets(4 * (groups + 1)),
        expert_ids(4 * groups),
        stats(8),
        counts(4 * std::int64_t{groups} * ranks),
        result(std::int64_t{config.max_tokens} * 2 * config.hidden) {}

  DeviceInputs inputs;
  DeviceBytes row_offsets, expert_ids, stats, counts, result;
};

class CudaMax : public DeviceTest {
 protected:
  static void replay_often(TestCase c) {
    c.config.deadline = 4;
    constexpr int kSets = 6;
    const int replays = number_from_environment("FERRY_REPLAYS", 10000);
    run(c.ranks, c, [&](Rank rank) {
      max::Exchange exchange(rank, c.config);
      const Config& config = exchange.config();
      const int groups = config.shared_experts + config.placement.local_experts(rank.index());
      const DeviceInputs inputs(config);
      const DeviceBytes result(std::int64_t{config.max_tokens} * 2 * config.hidden);
      const TestStream stream;
      max::DispatchResult received;
      const auto call = [&](const Tokens& of) {
        result.poison(stream.get());
        const Ids topk_ids = inputs.ids();
        const CallOptions on{.stream = {stream.get()}};
        const max::CombineOutput output{.output_tokens = {.data = result.data()},
                                        .router_weights = inputs.weights()};
        if (c.split_phases) {
          exchange.ep_dispatch_async(of, topk_ids, {.call = on});
          received = exchange.ep_dispatch_wait(on);
          exchange.ep_combine_async({{.data = received.output_tokens}, received}, output, on);
          exchange.ep_combine_wait(on);
        } else {
          received = exchange.ep_fused_dispatch(of, topk_ids, {.call = on});
          exchange.ep_fused_combine({{.data = received.output_tokens}, received}, output, on);
        }
      };
      const auto arrays_of = [&](const MaxSet& set) {
        ArrayPairs pairs;
        pairs.add(const_cast<std::uint32_t*>(received.row_offsets.data()), set.row_offsets.data(),
                  set.row_offsets.bytes());
        pairs.add(const_cast<std::int32_t*>(received.expert_ids.data()), set.expert_ids.data(),
                  set.expert_ids.bytes());
        pairs.add(const_cast<std::uint32_t*>(received.expert_usage_stats), set.stats.data(),
                  set.stats.bytes());
        pairs.add(const_cast<std::int32_t*>(received.counts.data()), set.counts.data(), set.counts.bytes());
        pairs.add(result.data(), set.result.data(), set.result.bytes());
        return pairs;
      };
      std::vector<MaxSet> sets;
      for (int index = 0; index < kSets; ++index) {
        const StepInputs step = make_inputs(c, index);
        const MaxSet& set = sets.emplace_back(step.inputs.ranks[static_cast<std::size_t>(rank.index())],
                                              config, groups, c.ranks);
        inputs.load(set.inputs, stream.get());
        call(inputs.tokens_of(set.inputs));
        exchange.synchronize({.stream = {stream.get()}});
        ArrayPairs kept;  // the other way round
        const ArrayPairs pairs = arrays_of(set);
        for (int i = 0; i < pairs.count; ++i)
          kept.add(const_cast<std::byte*>(pairs.pair[i].from), pairs.pair[i].to, pairs.pair[i].bytes);
        copy_arrays(kept, stream.get());
      }
      stream.synchronize();
      rank.barrier();
      const Graph graph(stream.get(), [&] { call(inputs.counted_tokens()); });
      rank.barrier();
      DeviceComparison comparison;
      for (int number = 0; number < replays; ++number) {
        const MaxSet& set = sets[static_cast<std::size_t>(number % kSets)];
        inputs.load(set.inputs, stream.get());
        graph.launch(stream.get());
        comparison.compare(arrays_of(set), number, stream.get());
        // A launch on a full stream blocks inside the driver, where ranks that share a device could deadlock.
        if (number % 50 == 49) stream.synchronize();
      }
      comparison.require_no_difference(
          stream.get(), {"row_offsets", "expert_ids", "expert_usage_stats", "counts", "result"});
      exchange.check();
    });
  }
};

TEST_F(CudaMax, ReplaysReadCurrentTokensAndIds) {
  replay_often(device_case(1, 3));
}

TEST_F(CudaMax, ReplaysInPhasesWithSharedExperts) {
  TestCase c = device_case(2, 2);
  c.config.shared_experts = 2;
  c.config.alignment = 4;
  c.split_phases = true;
  replay_often(c);
}

}  // namespace
}  // namespace ferry::contract
