// Calls captured in a CUDA graph and replayed, while only device memory changes.
#include "cuda/device_test.hpp"
#include "cuda/replays.hpp"
#include "harness/random.hpp"
#include "oracle/expected.hpp"

namespace ferry::contract {
namespace {

using CudaGraph = DeviceTest;

constexpr int kGraphSets = 6;

void require_metadata(const StepMetadata* on_device, const StepInputs& step, int rank) {
  StepMetadata got;
  device::copy(&got, on_device, sizeof got);
  std::vector<std::int32_t> counts;
  for (const oracle::RankInputs& inputs : step.inputs.ranks)
    counts.push_back(static_cast<std::int32_t>(inputs.tokens));
  const StepMetadata expected = oracle::step_metadata(counts, rank);
  require_equal(got.sum, expected.sum, "sum");
  require_equal(got.prefix, expected.prefix, "prefix");
  require_equal(got.maximum, expected.maximum, "maximum");
}

// Compares every replay, and what the host has of it.
void replay(const Rank& rank, const TestCase& c, int replays) {
  ferry::Exchange exchange(rank, c.config);
  DeviceRun device_run(exchange, c);
  add_steps(device_run, c, kGraphSets);
  std::vector<StepInputs> steps;
  for (int index = 0; index < kGraphSets; ++index) steps.push_back(make_inputs(c, index));
  const TestStream stream;
  const StepMetadata* metadata = nullptr;
  rank.barrier();  // no rank may allocate while another captures
  const Graph graph(stream.get(), [&] {
    device_run.dispatch(stream.get());
    device_run.combine(stream.get());
    metadata = exchange.metadata(device_run.count(), {.lane = c.lane, .stream = stream});
  });
  rank.barrier();
  for (int number = 0; number < replays; ++number) {
    const int set = number % kGraphSets;
    device_run.load(set, stream.get());
    device_run.poison_outputs(stream.get());
    graph.launch(stream.get());
    try {
      device_run.compare(set, stream.get());
      require_metadata(metadata, steps[static_cast<std::size_t>(set)], rank.index());
    } catch (const Mismatch& mismatch) {
      throw Mismatch(str("replay ", number, ", set ", set, ": ", mismatch.what()));
    }
  }
  exchange.check(c.lane);
}

TEST_F(CudaGraph, ReplaysReadCurrentInputs) {
  for (const int ranks : {1, 2, 4, 8}) {
    const TestCase c = device_case(static_cast<std::uint64_t>(ranks), ranks);
    run(ranks, c, [&](Rank rank) { replay(rank, c, number_from_environment("FERRY_REPLAYS", 1000)); });
  }
}

void replay_and_compare(DeviceRun& device_run, const Graph& graph, int set, cudaStream_t stream) {
  device_run.load(set, stream);
  device_run.poison_outputs(stream);
  graph.launch(stream);
  device_run.compare(set, stream);
}

TEST_F(CudaGraph, ReplaysOfOtherLayoutsAndExactSums) {
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
    for (const Format& format : {Format::bf16(), Format::fp32()}) {
      TestCase c = device_case(7, 3);
      c.config.layout = layout;
      c.config.format = format;
      c.type = natural_type(format);
      c.reduction = c.config.reduction = Reduction::exact;
      replay_often(c, {.replays = 200});
    }
  }
}

TEST_F(CudaGraph, ReplaysChooseReplicas) {
  for (const int ranks : {2, 4}) {
    TestCase c = device_case(static_cast<std::uint64_t>(20 + ranks), ranks);
    Random random(c.seed);
    give_replicas(random, c);
    run(ranks, c, [&](Rank rank) { replay(rank, c, number_from_environment("FERRY_REPLAYS", 200)); });
  }
}

// A call that does not fit the memory of the exchange is refused. Memory never moves or grows, so a captured
// graph still replays correctly, also next to a larger exchange.
TEST_F(CudaGraph, OversizedCallsAreRefusedAndGraphsStillReplay) {
  const TestCase c = device_case(2, 2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, kGraphSets);
    const TestStream stream;
    const Graph graph = capture_both(rank, device_run, stream.get());
    rank.barrier();
    const auto check_replays = [&] {
      for (int set = 0; set < kGraphSets; ++set) replay_and_compare(device_run, graph, set, stream.get());
    };
    const auto require_refused = [&](const std::string& number) {
      contract::require_refused(number, [&] {
        device_run.dispatch(stream.get());
        exchange.synchronize({.lane = c.lane, .stream = stream});
      });
    };
    check_replays();
    device_run.tokens().count = c.config.max_tokens + 1;
    require_refused(str(c.config.max_tokens + 1));
    device_run.tokens().count = c.config.max_tokens;
    check_replays();
    device_run.dispatch_options().format = Format::fp32();  // twice the bytes of a row
    device_run.tokens().type = DType::fp32;
    require_refused("fp32");
    device_run.dispatch_options().format.reset();
    device_run.tokens().type = c.type;
    check_replays();
    {
      Config larger = c.config;
      larger.max_tokens *= 100;
      const ferry::Exchange beside(rank, larger);
      check_replays();
      rank.barrier();
    }
    // Destruction waits for the device, which ranks may share: all exchanges are destroyed before the next
    // launch.
    rank.barrier();
    check_replays();
  });
}

// Eager calls and replays alternate: both take their call numbers from the lane.
TEST_F(CudaGraph, EagerCallsAndReplaysInterleave) {
  const TestCase c = device_case(1, 2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, kGraphSets);
    const TestStream stream;
    const auto both = [&] {
      device_run.dispatch(stream.get());
      device_run.combine(stream.get());
    };
    rank.barrier();
    const Graph graph(stream.get(), both);
    rank.barrier();
    for (int number = 0; number < 60; ++number) {
      device_run.load(number % kGraphSets, stream.get());
      device_run.poison_outputs(stream.get());
      if (number % 3 == 1) {
        both();
      } else {
        graph.launch(stream.get());
      }
      device_run.compare(number % kGraphSets, stream.get());
    }
  });
}

}  // namespace
}  // namespace ferry::contract
