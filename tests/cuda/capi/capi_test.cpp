// The C interface on GPUs: every call returns the oracle's bytes.
#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaCapi = DeviceTest;

void run_from_c(const TestCase& c) {
  constexpr int kSets = 4;
  const std::vector<PreparedStep> steps = prepare_steps(c, kSets);
  run_ranks({BackendKind::cuda, RankKind::threads}, c.ranks, describe(c), [&](Rank rank) {
    const auto in_c = kC.make_exchange(rank, c.config);
    ferry::Exchange exchange(rank, c.config);  // makes no calls
    DeviceRun device_run(exchange, c, in_c.get());
    for (const PreparedStep& step : steps) device_run.add_inputs(step.step, step.expert_outputs);
    const TestStream stream;
    for (int number = 0; number < 2 * kSets; ++number) {
      device_run.run_and_compare(number % kSets, stream.get());
      in_c->check(c.lane);
    }
  });
}

TEST_F(CudaCapi, CallsReturnTheOraclesBytes) {
  constexpr Reduction kReductions[] = {Reduction::partial, Reduction::exact, Reduction::unreduced};
  int number = 0;
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
    for (const Format& format :
         {Format::bf16(), Format::fp32(), Format::fp8_e4m3(),
          Format::fp8_e4m3({.power_of_two = true, .packed = true}), Format::raw({128, 16})}) {
      TestCase c = device_case(static_cast<std::uint64_t>(50 + number), 2);
      c.config.layout = layout;
      c.config.format = format;
      c.type = natural_type(format);
      c.reduction = layout == Layout::rank_major ? Reduction::partial : kReductions[number % 3];
      c.config.reduction = c.reduction;
      c.split_phases = number % 2 == 1;
      if (layout == Layout::rank_major || c.reduction == Reduction::unreduced)
        c.weights_from = WeightsFrom::none;
      ++number;
      run_from_c(c);
    }
  }
}

}  // namespace
}  // namespace ferry::contract
