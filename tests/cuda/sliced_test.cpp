// Experts in slices in CUDA graphs: replays read N and the ids anew.
#include "cuda/device_test.hpp"
#include "cuda/replays.hpp"

namespace ferry::contract {
namespace {

constexpr int kTp = 2;

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
      const auto call = [&](const Tokens& of) {
        received.poison(stream.get());
        received_weight.poison(stream.get());
        result.poison(stream.get());
        const CallOptions on{.stream = stream};
        DispatchOptions options{.call = on};
        options.memory.parts[0] = received.data();
        options.memory.weight = received_weight.as<float>();
        options.memory.counts = counts.as<std::int32_t>();
        options.memory.row_offsets = row_offsets.as<std::int32_t>();
        const DispatchResult rows = exchange.dispatch(of, inputs.ids(), inputs.weights(), options);
        exchange.combine({.data = rows.data}, rows.plan, {.data = result.data()},
                         {.call = on, .row_weights = rows.weight});
      };
      replay_like_eager(exchange, rank.index() / kTp, c, inputs, stream, call, [&] {
        const auto array = [](const char* name, const DeviceBytes& of) {
          return OutputArray{name, of.data(), of.bytes()};
        };
        return std::vector<OutputArray>{array("rows", received), array("weight", received_weight),
                                        array("counts", counts), array("row_offsets", row_offsets),
                                        array("result", result)};
      });
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
