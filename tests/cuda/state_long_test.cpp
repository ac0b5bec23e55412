// After 100,000 calls (or FERRY_CALLS) an exchange uses the same resources as after its first calls.
#include <filesystem>

#include "backends/cuda/host/lane.hpp"
#include "cuda/device_test.hpp"
#include "exchange/configuration.hpp"

namespace ferry::contract {
namespace {

using CudaState = DeviceTest;

struct ResourceUse {
  std::int64_t device_bytes = 0, descriptors = 0, threads = 0;
};

std::int64_t entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

// One rank at a time: listing a folder opens a file descriptor, which another rank of the process would
// count.
ResourceUse measure_resources(Rank& rank) {
  ResourceUse use;
  for (int index = 0; index < rank.size(); ++index) {
    if (index == rank.index())
      use = {device::memory_in_use(), entries("/proc/self/fd"), entries("/proc/self/task")};
    rank.barrier();
  }
  return use;
}

TEST_F(CudaState, ResourcesDoNotGrowOver100000Calls) {
  constexpr int kSets = 4;
  const int pairs = number_from_environment("FERRY_CALLS", 100000) / 2;  // one dispatch and one combine each
  TestCase c = device_case(1, 2);
  c.config.max_tokens = 8;
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, kSets);
    const TestStream stream;
    ResourceUse before;
    for (int number = 0; number < pairs; ++number) {
      const bool checked = number % 1000 == 999;
      device_run.load(number % kSets, stream.get());
      if (checked) device_run.poison_outputs(stream.get());
      device_run.dispatch(stream.get());
      device_run.combine(stream.get());
      if (checked) device_run.compare(number % kSets, stream.get());
      if (number == 1999) before = measure_resources(rank);
    }
    const ResourceUse after = measure_resources(rank);
    require_equal(after.device_bytes, before.device_bytes, "device memory");
    require_equal(after.descriptors, before.descriptors, "file descriptors");
    require_equal(after.threads, before.threads, "threads");
    require_equal(exchange.load_counts().dispatches, std::int64_t{pairs}, "dispatches counted");
    exchange.check(c.lane);
  });
}

// A lane of the CUDA backend without its exchange, so that the test can read its memory.
class BareLane {
 public:
  BareLane(const Rank& rank, const TestCase& c)
      : shared_(rank, complete_config(c.config, c.ranks)),
        lane_(shared_, 0),
        plan_(plan_bytes(shared_.config, c.ranks)) {
    rank.barrier();  // no kernel may write to a peer that has no memory yet
  }

  void call(const DispatchCall& dispatch, const CombineCall& combine, const TestStream& stream) {
    DispatchCall with_plan = dispatch;
    with_plan.memory.plan = plan_.data();
    const DispatchResult received = lane_.dispatch(with_plan, cuda::Phase::fused, stream);
    CombineCall combine_received = combine;
    combine_received.plan = received.plan;
    combine_received.row_weights = received.weight;
    lane_.combine(combine_received, cuda::Phase::fused, stream);
  }

  // The lane's memory as 8-byte words.
  std::vector<std::uint64_t> words() const {
    std::vector<std::uint64_t> words(static_cast<std::size_t>(lane_.memory().bytes() / 8));
    device::copy(words.data(), lane_.memory().data(), static_cast<std::int64_t>(words.size()) * 8);
    return words;
  }

 private:
  const cuda::ExchangeState shared_;
  cuda::Lane lane_;
  DeviceBytes plan_;
};

// Whether a word is unchanged, is a call number, or is a counter to which every pair of calls adds the same
// amount.
bool is_unchanged_or_counter(std::uint64_t early, std::uint64_t late, std::uint64_t early_pairs,
                             std::uint64_t late_pairs) {
  const bool call_number = late - early == 2 * (late_pairs - early_pairs) && early <= 2 * early_pairs;
  const bool counter = early % early_pairs == 0 && early / early_pairs * late_pairs == late;
  return early == late || call_number || counter;
}

// All calls are equal, so the lane's memory may differ only in call numbers and counters.
TEST_F(CudaState, OnlyCountersChangeOver100000Calls) {
  constexpr std::uint64_t kEarly = 1000, kLate = 51000;  // pairs of dispatch and combine
  TestCase c = device_case(3, 2);
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    const StepInputs step = make_inputs(c);
    const oracle::RankInputs& mine = step.inputs.ranks[static_cast<std::size_t>(rank.index())];
    const DeviceBytes tokens(mine.parts[0]), weights(bytes_of_values(mine.weights)),
        ids(bytes_of_values(mine.ids)),
        outputs(make_expert_outputs(c, step).ranks[static_cast<std::size_t>(rank.index())].rows),
        result(c.config.max_tokens * c.config.hidden * 2);
    DispatchCall dispatch;
    dispatch.tokens = Tokens::rows(tokens.data(), mine.tokens);
    dispatch.ids = Ids(ids.as<std::int64_t>());
    dispatch.weights = weights.as<float>();
    CombineCall combine;
    combine.outputs = {outputs.data()};
    combine.result = {result.data()};
    const TestStream stream;
    std::vector<std::uint64_t> early;
    BareLane lane(rank, c);
    for (std::uint64_t number = 1; number <= kLate; ++number) {
      lane.call(dispatch, combine, stream);
      // A launch on a full stream blocks inside the driver, where ranks that share a device could deadlock.
      if (number % 100 == 0) stream.synchronize();
      if (number == kEarly) early = lane.words();
    }
    const std::vector<std::uint64_t> late = lane.words();
    rank.barrier();  // no rank may free memory while kernels of others can write to it
    for (std::size_t word = 0; word < late.size(); ++word) {
      require(is_unchanged_or_counter(early[word], late[word], kEarly, kLate), "word ", word, " of ",
              late.size(), " was ", early[word], " after ", 2 * kEarly, " calls and is ", late[word],
              " after ", 2 * kLate);
    }
  });
}

TEST_F(CudaState, DestroyedExchangesFreeTheirResources) {
  TestCase c = device_case(2, 2);
  c.config.max_tokens = 2000;
  c.config.hidden = 2048;
  run(c.ranks, c, [&](Rank rank) {
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
    ResourceUse before;
    for (int number = 0; number < 50; ++number) {
      {
        ferry::Exchange exchange(rank, c.config);
        DeviceRun device_run(exchange, c);
        device_run.add_inputs(step, expert_outputs);
        const TestStream stream;
        device_run.run_and_compare(0, stream.get());
      }
      rank.barrier();
      if (number == 4) before = measure_resources(rank);
    }
    const ResourceUse after = measure_resources(rank);
    require_equal(after.device_bytes, before.device_bytes, "device memory");
    require_equal(after.descriptors, before.descriptors, "file descriptors");
    require_equal(after.threads, before.threads, "threads");
  });
}

}  // namespace
}  // namespace ferry::contract
