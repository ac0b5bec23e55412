// Calls captured in a graph, and replayed with inputs that change in device memory alone.
#include <array>

#include "backends/cuda/dispatch/send_partition.hpp"
#include "cuda/device_test.hpp"
#include "oracle/expected.hpp"

namespace ferry::contract {
namespace {

using CudaGraph = OnDevices;

constexpr int kSets = 6;

void require_metadata(const StepMetadata* on_device, const Step& step, int rank) {
  StepMetadata got;
  device::copy(&got, on_device, sizeof got);
  std::vector<std::int32_t> counts;
  for (const oracle::RankInputs& inputs : step.global.ranks)
    counts.push_back(static_cast<std::int32_t>(inputs.tokens));
  const StepMetadata expected = oracle::step_metadata(counts, rank);
  require_equal(got.sum, expected.sum, "sum");
  require_equal(got.prefix, expected.prefix, "prefix");
  require_equal(got.maximum, expected.maximum, "maximum");
}

// Compares every so many replays; those in between follow each other without the host.
void replay(const Rank& rank, const Case& c, int replays, int compared) {
  ferry::Exchange exchange(rank, c.config);
  DeviceRun play(exchange, c);
  keep_steps(play, c, kSets);
  std::vector<Step> steps;
  for (int index = 0; index < kSets; ++index) steps.push_back(make_step(c, index));
  const OwnStream stream;
  const StepMetadata* metadata = nullptr;
  rank.barrier();  // nobody allocates while anybody captures
  const Graph graph(stream.get(), [&] {
    play.dispatch(stream.get());
    play.combine(stream.get());
    metadata = exchange.metadata(play.count(), c.lane, stream);
  });
  rank.barrier();
  for (int number = 0; number < replays; ++number) {
    const int set = number % kSets;
    const bool looks = number % compared == 0 || number == replays - 1;
    play.use(set, stream.get());
    if (looks) play.poison(stream.get());
    graph.launch(stream.get());
    if (!looks) continue;
    try {
      play.compare(set, stream.get());
      require_metadata(metadata, steps[static_cast<std::size_t>(set)], rank.index());
    } catch (const Mismatch& mismatch) {
      throw Mismatch(str("replay ", number, ", set ", set, ": ", mismatch.what()));
    }
  }
  exchange.check(c.lane);
}

TEST_F(CudaGraph, ReplaysFollowTheDevicesMemory) {
  for (const int ranks : {1, 2, 4, 8}) {
    const Case c = device_case(static_cast<std::uint64_t>(ranks), ranks);
    run(ranks, c, [&](Rank rank) { replay(rank, c, from_environment("FERRY_REPLAYS", 1000), 1); });
  }
}

// A dispatch and the combine after it. A barrier follows: nobody allocates while anybody captures.
Graph capture_both(const Rank& rank, DeviceRun& play, cudaStream_t stream) {
  rank.barrier();
  return Graph(stream, [&] {
    play.dispatch(stream);
    play.combine(stream);
  });
}

void replay_and_compare(DeviceRun& play, const Graph& graph, int set, cudaStream_t stream) {
  play.use(set, stream);
  play.poison(stream);
  graph.launch(stream);
  play.compare(set, stream);
}

// How messages lie follows from the number of tokens, which only the device knows: with each replay a rank is
// on the other side of what counts as few, and not all ranks on the same.
TEST_F(CudaGraph, ReplaysWithFewTokensAndMany) {
  constexpr auto kMany = static_cast<int>(cuda::kManyTokens);
  constexpr std::array kTokens = {0, kMany, 1, kMany + 1, kMany - 1, 600};
  Case c = device_case(9, 3);
  c.config.max_tokens = kTokens.back();
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play(exchange, c);
    for (std::size_t set = 0; set < kTokens.size(); ++set) {
      Case of_set = c;
      of_set.tokens.clear();
      for (std::size_t of_rank : {0, 2, 3})
        of_set.tokens.push_back(kTokens[(set + of_rank) % kTokens.size()]);
      const Step step = make_step(of_set, static_cast<int>(set));
      play.keep(step, make_outcome(of_set, step));
    }
    const OwnStream stream;
    const Graph graph = capture_both(rank, play, stream.get());
    rank.barrier();
    for (int number = 0; number < 60; ++number) {
      const int set = number % static_cast<int>(kTokens.size());
      replay_and_compare(play, graph, set, stream.get());
    }
    exchange.check(c.lane);
  });
}

TEST_F(CudaGraph, ReplaysOfOtherLayoutsAndSums) {
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
    for (const Format& format : {Format::bf16(), Format::fp32()}) {
      Case c = device_case(7, 3);
      c.config.layout = layout;
      c.config.format = format;
      c.type = natural_type(format);
      c.reduction = c.config.reduction = Reduction::exact;
      run(c.ranks, c, [&](Rank rank) { replay(rank, c, 200, kSets + 1); });
    }
  }
}

// What does not fit into the memory that a graph was captured with is refused; nothing moves or grows, so the
// graph goes on working, also beside an exchange with room for more.
TEST_F(CudaGraph, WhatDoesNotFitIsRefusedAndGraphsGoOn) {
  const Case c = device_case(2, 2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play(exchange, c);
    keep_steps(play, c, kSets);
    const OwnStream stream;
    const Graph graph = capture_both(rank, play, stream.get());
    rank.barrier();
    const auto replays_are_right = [&] {
      for (int set = 0; set < kSets; ++set) replay_and_compare(play, graph, set, stream.get());
    };
    const auto is_refused = [&](const std::string& number) {
      std::string message;
      try {
        play.dispatch(stream.get());
        exchange.synchronize(c.lane, stream);
      } catch (const UsageError& error) {
        message = error.what();
      }
      require(message.find(number) != std::string::npos, "the refusal names ", number, ": ", message);
    };
    replays_are_right();
    play.tokens().count = c.config.max_tokens + 1;
    is_refused(str(c.config.max_tokens + 1));
    play.tokens().count = c.config.max_tokens;
    replays_are_right();
    play.dispatch_options().format = Format::fp32();  // twice the bytes of a row
    play.tokens().type = DType::fp32;
    is_refused("fp32");
    play.dispatch_options().format.reset();
    play.tokens().type = c.type;
    replays_are_right();
    {
      Config larger = c.config;
      larger.max_tokens *= 100;
      const ferry::Exchange beside(rank, larger);
      replays_are_right();
      rank.barrier();
    }
    // Destruction waits for the device, which ranks may share.
    rank.barrier();
    replays_are_right();
  });
}

// Eager calls between replays: both take their numbers from the lane.
TEST_F(CudaGraph, EagerCallsAndReplaysTakeTurns) {
  const Case c = device_case(1, 2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play(exchange, c);
    keep_steps(play, c, kSets);
    const OwnStream stream;
    const auto both = [&] {
      play.dispatch(stream.get());
      play.combine(stream.get());
    };
    rank.barrier();
    const Graph graph(stream.get(), both);
    rank.barrier();
    for (int number = 0; number < 60; ++number) {
      play.use(number % kSets, stream.get());
      play.poison(stream.get());
      if (number % 3 == 1) {
        both();
      } else {
        graph.launch(stream.get());
      }
      play.compare(number % kSets, stream.get());
    }
  });
}

}  // namespace
}  // namespace ferry::contract
