// MAX's calls in CUDA graphs: replays read N and the ids anew.
#include "ferry/max.hpp"
#include "cuda/device_test.hpp"
#include "cuda/replays.hpp"

namespace ferry::contract {
namespace {

class CudaMax : public DeviceTest {
 protected:
  static void replay_often(TestCase c) {
    c.config.deadline = 4;
    run(c.ranks, c, [&](Rank rank) {
      max::Exchange exchange(rank, c.config);
      const Config& config = exchange.config();
      const DeviceInputs inputs(config);
      const DeviceBytes result(std::int64_t{config.max_tokens} * 2 * config.hidden);
      const TestStream stream;
      max::DispatchResult received;
      const auto call = [&](const Tokens& of) {
        result.poison(stream.get());
        const Ids topk_ids = inputs.ids();
        const CallOptions on{.stream = stream};
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
      replay_like_eager(exchange, rank.index(), c, inputs, stream, call, [&] {
        const auto words = [](const char* name, const auto& array) {
          return OutputArray{name, array.data(), 4 * std::ssize(array)};
        };
        return std::vector<OutputArray>{words("row_offsets", received.row_offsets),
                                        words("expert_ids", received.expert_ids),
                                        {"expert_usage_stats", received.expert_usage_stats, 8},
                                        words("counts", received.counts),
                                        {"result", result.data(), result.bytes()}};
      });
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
