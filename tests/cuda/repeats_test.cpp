// The same inputs give the same bytes in every repetition, for every number of SMs, with random delays inside
// kernels.
#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaRepeats = DeviceTest;

constexpr int kRepeats = 1000;

// Every repetition is compared with the oracle's bytes on the device.
void repeat(const TestCase& c, const PreparedStep& prepared) {
  run_ranks({BackendKind::cuda, RankKind::threads}, c.ranks, describe(c), [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    device_run.add_inputs(prepared.step, prepared.expert_outputs);
    device_run.prepare_comparisons();
    const TestStream stream;
    device_run.load(0, stream.get());
    for (const int limit : {1, 2, 4, 8, 16, 24, 32, 64, 0}) {
      device_run.dispatch_options().call.sm_limit = device_run.combine_options().call.sm_limit = limit;
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        device_run.poison_outputs(stream.get());
        device_run.dispatch(stream.get());
        device_run.combine(stream.get());
        device_run.compare_on_device(0, repeat, stream.get());
        // A launch on a full stream blocks inside the driver, where ranks that share a device could deadlock.
        if (repeat % 100 == 99) stream.synchronize();
      }
      try {
        device_run.require_no_difference(stream.get());
      } catch (const Mismatch& mismatch) {
        throw Mismatch(str("sm_limit = ", limit, ": ", mismatch.what()));
      }
    }
    exchange.check(c.lane);
  });
}

TEST_F(CudaRepeats, ThousandDelayedCallsGiveTheSameBytesForEachSmLimit) {
  if (!kTestHooks) GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  const ScopedJitter jitter("20");
  struct Kind {
    Reduction reduction;
    Format format;
    int tokens;
  };
  for (const Kind& kind :
       {Kind{Reduction::partial, Format::bf16(), 300}, Kind{Reduction::exact, Format::fp8_e4m3(), 24},
        Kind{Reduction::partial, Format::fp8_e4m3(), 24}, Kind{Reduction::exact, Format::bf16(), 300}}) {
    TestCase c = device_case(static_cast<std::uint64_t>(kind.tokens), 2);
    c.config.max_tokens = kind.tokens;
    c.config.format = kind.format;
    c.reduction = c.config.reduction = kind.reduction;
    c.full = true;
    repeat(c, prepare(c));
  }
}

}  // namespace
}  // namespace ferry::contract
