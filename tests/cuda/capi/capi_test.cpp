// The C interface on GPUs: every call returns the oracle's bytes.
#include <memory>

#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "cuda/capi/c_calls.hpp"
#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaCapi = DeviceTest;

// The arguments of a DeviceRun, as C has them. C passes N by value.
ferry_dispatch_args dispatch_args(DeviceRun& device_run, std::int64_t tokens, ferry_dispatch_result* result,
                                  cudaStream_t stream) {
  auto args = sized<ferry_dispatch_args>();
  const ReceiveBuffers& memory = device_run.dispatch_options().memory;
  for (std::size_t part = 0; part < kMaxParts; ++part) {
    args.tokens.parts[part] = device_run.tokens().parts[part];
    args.memory.parts[part] = memory.parts[part];
  }
  args.tokens.count = tokens;
  args.tokens.type = static_cast<std::int32_t>(device_run.tokens().type);
  args.ids = device_run.ids();
  args.id_type = FERRY_INT32;
  args.weights = device_run.weights();
  args.memory.weight = memory.weight;
  args.memory.plan = memory.plan;
  args.call.stream = stream;
  args.result = result;
  return args;
}

void call_from_c(ferry_exchange* exchange, DeviceRun& device_run, const TestCase& c, std::int64_t tokens,
                 cudaStream_t stream) {
  auto rows = sized<ferry_dispatch_result>();
  const ferry_dispatch_args args = dispatch_args(device_run, tokens, &rows, stream);
  if (c.split_phases) {
    require_ok(ferry_dispatch_send(exchange, &args), "ferry_dispatch_send");
    require_ok(ferry_dispatch_receive(exchange, &args.call, &rows), "ferry_dispatch_receive");
  } else {
    require_ok(ferry_dispatch(exchange, &args), "ferry_dispatch");
  }
  device_run.set_received(exchange->exchange.last_dispatch_result());
  require(rows.counts == device_run.received().counts &&
              rows.row_offsets == device_run.received().row_offsets &&
              rows.plan.storage == device_run.received().plan.storage(),
          "the result in C is not that of the exchange");

  auto combine = sized<ferry_combine_args>();
  combine.outputs.data = const_cast<void*>(device_run.outputs().data);
  combine.outputs.type = static_cast<std::int32_t>(c.outputs);
  combine.result.data = device_run.result_memory().data();
  combine.result.type = static_cast<std::int32_t>(c.result);
  combine.plan = rows.plan;
  if (c.weights_from == WeightsFrom::row_weights) combine.row_weights = rows.weight;
  combine.reduction = static_cast<std::int32_t>(c.reduction) + 1;
  combine.call.stream = stream;
  if (c.split_phases) {
    require_ok(ferry_combine_send(exchange, &combine), "ferry_combine_send");
    require_ok(ferry_combine_receive(exchange, &args.call), "ferry_combine_receive");
  } else {
    require_ok(ferry_combine(exchange, &combine), "ferry_combine");
  }
}

void run_from_c(const TestCase& c) {
  constexpr int kSets = 4;
  const std::vector<PreparedStep> steps = prepare_steps(c, kSets);
  run_ranks({BackendKind::cuda, RankKind::threads}, c.ranks, describe(c), [&](Rank rank) {
    const ferry_rank handle{rank};
    ferry_config config = capi::to_c(c.config);
    config.size = sizeof config;
    ferry_exchange* exchange = nullptr;
    require_ok(ferry_exchange_create(&handle, &config, &exchange), "ferry_exchange_create");
    const std::unique_ptr<ferry_exchange, void (*)(ferry_exchange*)> owner(exchange, ferry_exchange_destroy);
    DeviceRun device_run(exchange->exchange, c);
    for (const PreparedStep& step : steps) device_run.add_inputs(step.step, step.expert_outputs);
    const TestStream stream;
    for (int number = 0; number < 2 * kSets; ++number) {
      const int set = number % kSets;
      const StepInputs& step = steps[static_cast<std::size_t>(set)].step;
      device_run.load(set, stream.get());
      device_run.poison_outputs(stream.get());
      call_from_c(exchange, device_run, c, step.inputs.ranks[static_cast<std::size_t>(rank.index())].tokens,
                  stream.get());
      device_run.compare(set, stream.get());
      require_ok(ferry_check(exchange, 0), "ferry_check");
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
