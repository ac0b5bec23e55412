// Values that only the device reads: invalid token counts and expert ids, and the count of metadata().
#include "backends/cuda/dispatch/send_partition.hpp"
#include "cuda/device_test.hpp"
#include "cuda/replays.hpp"

namespace ferry::contract {
namespace {

using CudaCounts = DeviceTest;

// The same inputs, without the tokens of one rank.
StepInputs without_tokens_of(const TestCase& c, const StepInputs& step, int rank) {
  std::vector<std::vector<std::int64_t>> ids;
  for (const oracle::RankInputs& inputs : step.inputs.ranks) ids.push_back(inputs.ids);
  ids[static_cast<std::size_t>(rank)].clear();
  return inputs_from_ids(c, ids, step.index);
}

void set_count(const DeviceRun& device_run, std::int32_t count) {
  device::copy(device_run.count(), &count, sizeof count);
}

TEST_F(CudaCounts, InvalidCountsSendNothingAndAreReported) {
  constexpr int kWrongRank = 1;
  TestCase c = device_case(1, 3);
  c.full = true;
  for (const std::int32_t count : {c.config.max_tokens + 1, 0x7FFFFFFF, -1, -0x7FFFFFFF - 1}) {
    run(c.ranks, c, [&](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun device_run(exchange, c);
      const StepInputs whole = make_inputs(c), without = without_tokens_of(c, whole, kWrongRank);
      const int good = device_run.add_inputs(whole, make_expert_outputs(c, whole));
      const int reduced = device_run.add_inputs(without, make_expert_outputs(c, without));
      const TestStream stream;
      for (int repeat = 0; repeat < 3; ++repeat) {
        device_run.load(reduced, stream.get());
        device_run.poison_outputs(stream.get());
        stream.synchronize();
        if (rank.index() == kWrongRank) set_count(device_run, count);
        device_run.dispatch(stream.get());
        bool reported = false;
        try {
          exchange.synchronize({.lane = c.lane, .stream = stream});
          exchange.check(c.lane);
        } catch (const UsageError& error) {
          reported = true;
          require(std::string(error.what()).find(str(count)) != std::string::npos, "message: ", error.what());
        }
        require_equal(reported, rank.index() == kWrongRank, "the error is reported");
        if (rank.index() == kWrongRank)
          require_equal(device_run.received().host->call, device_run.received().call, "host call number");
        // The exchange is still usable.
        device_run.run_and_compare(good, stream.get());
        exchange.check(c.lane);
      }
    });
  }
}

TEST_F(CudaCounts, PeersReceiveNothingFromARankWithAnInvalidCount) {
  TestCase c = device_case(2, 2);
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    const StepInputs without = without_tokens_of(c, make_inputs(c), 1);
    const int reduced = device_run.add_inputs(without, make_expert_outputs(c, without));
    const TestStream stream;
    device_run.load(reduced, stream.get());
    device_run.poison_outputs(stream.get());
    stream.synchronize();
    if (rank.index() == 1) set_count(device_run, c.config.max_tokens + 1);
    device_run.dispatch(stream.get());
    stream.synchronize();
    if (rank.index() == 1) return;
    device_run.combine_options().row_weights = nullptr;
    std::int32_t total = -1;
    device::copy(&total, device_run.received().total, sizeof total);
    require_equal(total, without.positions.ranks[0].row_offsets.back(), "rows");
  });
}

TEST_F(CudaCounts, BadIdsInDeviceMemoryAreReported) {
  TestCase c = device_case(3, 3);
  c.bad_ids = 0.2;
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    const TestStream stream;
    for (int index = 0; index < 10; ++index) {
      const StepInputs step = make_inputs(c, index);
      const int set = device_run.add_inputs(step, make_expert_outputs(c, step));
      device_run.run_and_compare(set, stream.get());
      const BadId& expected = step.positions.bad_ids[static_cast<std::size_t>(rank.index())];
      try {
        exchange.check(c.lane);
        require(expected.count == 0, "no bad id is reported; expected ", expected.count);
      } catch (const BadIdError& error) {
        require_equal(error.bad.count, expected.count, "bad ids");
        require_equal(error.bad.token, expected.token, "token of the first");
        require_equal(error.bad.slot, expected.slot, "slot of the first");
        require_equal(error.bad.id, expected.id, "first bad id");
      }
    }
  });
}

// The count must be read when the call executes, not when it is enqueued.
TEST_F(CudaCounts, MetadataReadsTheCountAtExecution) {
  const TestCase c = device_case(4, 4);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    const DeviceBytes count(16);
    const TestStream stream;
    for (std::int32_t call = 0; call < 10; ++call) {
      const std::int32_t mine = 100 * call + rank.index();
      device::copy(count.data(), &mine, sizeof mine);
      const StepMetadata* at = exchange.metadata(count.as<std::int32_t>(), {.stream = stream});
      exchange.synchronize({.stream = stream});
      StepMetadata got;
      device::copy(&got, at, sizeof got);
      require_equal(got.sum, 400 * call + 6, "sum");
      require_equal(got.maximum, 100 * call + 3, "maximum");
      require_equal(got.prefix, 100 * call * rank.index() + rank.index() * (rank.index() - 1) / 2, "prefix");
    }
  });
}

// A graph captured with max_tokens is replayed with fewer tokens on the device, or none: ranks cross the
// limit from which messages have another layout, and not all are on the same side of it. Rows and ids past N
// are those of earlier replays, so a padding token that was sent would arrive.
TEST_F(CudaCounts, ReplaysWithFewerTokensInEveryLayoutAndFormat) {
  const std::vector<Format> formats = {Format::bf16(),
                                       Format::fp16(),
                                       Format::fp32(),
                                       Format::fp8_e4m3(),
                                       Format::fp8_e4m3({.column_major = true}),
                                       Format::fp8_e4m3({.power_of_two = true, .packed = true}),
                                       Format::mxfp8(),
                                       Format::mxfp4({.column_major = true}),
                                       Format::nvfp4({.per_token = true}),
                                       Format::nvfp4({.tiles = true}),
                                       Format::raw({256, 16})};
  constexpr Reduction kReductions[] = {Reduction::partial, Reduction::exact, Reduction::unreduced};
  constexpr int kMany = static_cast<int>(cuda::kManyTokens), kMost = kMany + 44;
  int number = 0;
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
    for (const Format& format : formats) {
      if (format.nvfp4_options.tiles && layout == Layout::rank_major) continue;
      TestCase c = device_case(static_cast<std::uint64_t>(10 + number), number == 0 ? 3 : 2);
      c.config.max_tokens = kMost;
      c.config.layout = layout;
      c.config.format = format;
      c.type = natural_type(format);
      c.reduction = c.config.reduction = kReductions[number % 3];
      c.split_phases = number % 2 == 1;
      if (layout == Layout::rank_major) {
        c.reduction = c.config.reduction = Reduction::partial;
        c.weights_from = WeightsFrom::none;
      }
      if (c.reduction == Reduction::unreduced) c.weights_from = WeightsFrom::none;
      ++number;
      replay_often(c, {.tokens = {kMost, 0, 17, kMany + 1, kMany, kMany - 1, 1}, .replays = 28});
    }
  }
}

}  // namespace
}  // namespace ferry::contract
