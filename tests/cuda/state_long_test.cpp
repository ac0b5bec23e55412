// Checks that 100,000 calls leave nothing behind. FERRY_CALLS sets the calls of the test of a million.
#include <filesystem>
#include <memory>

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

// Compares every call on the device.
void call_many_times(const TestCase& c, int calls) {
  constexpr int kSets = 4;
  const int pairs = calls / 2;  // one dispatch and one combine each
  run_ranks({BackendKind::cuda, RankKind::threads}, c.ranks, describe(c), [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, kSets);
    device_run.prepare_comparisons();
    const TestStream stream;
    ResourceUse before;
    for (int number = 0; number < pairs; ++number) {
      device_run.load(number % kSets, stream.get());
      device_run.poison_outputs(stream.get());
      device_run.dispatch(stream.get());
      device_run.combine(stream.get());
      device_run.compare_on_device(number % kSets, number, stream.get());
      // A launch on a full stream blocks inside the driver, where ranks that share a device could deadlock.
      if (number % 100 == 99) stream.synchronize();
      if (number % 10000 == 9999) device_run.require_no_difference(stream.get());
      if (number == 1999) before = measure_resources(rank);
    }
    device_run.require_no_difference(stream.get());
    const ResourceUse after = measure_resources(rank);
    require_equal(after.device_bytes, before.device_bytes, "device memory");
    require_equal(after.descriptors, before.descriptors, "file descriptors");
    require_equal(after.threads, before.threads, "threads");
    require_equal(exchange.load_counts().dispatches, std::int64_t{pairs}, "dispatches counted");
    exchange.check(c.lane);
  });
}

TEST_F(CudaState, ResourcesDoNotGrowOver100000Calls) {
  TestCase c = device_case(1, 2);
  c.config.max_tokens = 8;
  call_many_times(c, 100000);
}

TEST_F(CudaState, EachOfAMillionDelayedCallsReturnsTheOraclesBytes) {
  if (!kTestHooks) GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  const ScopedJitter jitter("10");
  TestCase c = device_case(8, 2);
  c.config.max_tokens = 8;
  call_many_times(c, number_from_environment("FERRY_CALLS", 1000000));
}

// The lanes of a CUDA exchange without the exchange, so that the test can read their memory.
class BareLanes {
 public:
  BareLanes(const Rank& rank, const TestCase& c)
      : shared_(rank, complete_config(c.config, c.ranks), cuda::Reach::mapped) {
    for (int lane = 0; lane < c.config.lanes; ++lane) {
      lanes_.push_back(std::make_unique<cuda::Lane>(shared_, lane));
      plans_.emplace_back(plan_bytes(shared_.config, c.ranks));
    }
    rank.barrier();  // no kernel may write to a peer that has no memory yet
  }

  // One dispatch and one combine on each lane.
  void call(const DispatchCall& dispatch, const CombineCall& combine, bool split_phases,
            const TestStream& stream) {
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      cuda::Lane& lane = *lanes_[i];
      DispatchCall with_plan = dispatch;
      with_plan.options = {.lane = static_cast<int>(i), .stream = stream};
      with_plan.memory.plan = plans_[i].data();
      DispatchResult received = lane.dispatch(with_plan, split_phases);
      if (split_phases) received = lane.dispatch_receive(stream);
      CombineCall combine_received = combine;
      combine_received.options = with_plan.options;
      combine_received.plan = received.plan;
      if (combine.row_weights != nullptr) combine_received.row_weights = received.weight;
      lane.combine(combine_received, split_phases);
      if (split_phases) lane.combine_receive(stream);
    }
  }

  // The memory of all lanes as 8-byte words.
  std::vector<std::uint64_t> words() const {
    std::vector<std::uint64_t> all;
    for (const std::unique_ptr<cuda::Lane>& lane : lanes_) {
      std::vector<std::uint64_t> words(static_cast<std::size_t>(lane->memory().bytes() / 8));
      device::copy(words.data(), lane->memory().data(), static_cast<std::int64_t>(words.size()) * 8);
      all.insert(all.end(), words.begin(), words.end());
    }
    return all;
  }

 private:
  const cuda::ExchangeState shared_;
  std::vector<std::unique_ptr<cuda::Lane>> lanes_;
  std::vector<DeviceBytes> plans_;
};

// Whether a word is unchanged, is a call number, or is a counter to which every pair of calls adds the same
// amount.
bool is_unchanged_or_counter(std::uint64_t early, std::uint64_t late, std::uint64_t early_pairs,
                             std::uint64_t late_pairs) {
  const bool call_number = late - early == 2 * (late_pairs - early_pairs) && early <= 2 * early_pairs;
  const bool counter = early % early_pairs == 0 && early / early_pairs * late_pairs == late;
  return early == late || call_number || counter;
}

// All calls are equal, so the lanes' memory may differ only in call numbers and counters.
void require_only_counters_change(const TestCase& c) {
  constexpr std::uint64_t kEarly = 1000, kLate = 51000;  // pairs of dispatch and combine
  run_ranks({BackendKind::cuda, RankKind::threads}, c.ranks, describe(c), [&](Rank rank) {
    const StepInputs step = make_inputs(c);
    const oracle::RankInputs& mine = step.inputs.ranks[static_cast<std::size_t>(rank.index())];
    const DeviceBytes tokens(mine.parts[0]), weights(bytes_of_values(mine.weights)),
        ids(bytes_of_values(mine.ids)),
        outputs(make_expert_outputs(c, step).ranks[static_cast<std::size_t>(rank.index())].rows),
        result(std::int64_t{c.config.max_tokens} * c.config.hidden * c.config.top_k * 2);
    DispatchCall dispatch;
    dispatch.tokens = Tokens::rows(tokens.data(), mine.tokens);
    dispatch.ids = Ids(ids.as<std::int64_t>());
    dispatch.weights = weights.as<float>();
    dispatch.weighted = true;
    dispatch.format = c.config.format;
    CombineCall combine;
    combine.outputs = {outputs.data()};
    combine.result = {result.data()};
    combine.reduction = c.reduction;
    // Replaced by the received weights of each call.
    if (c.weights_from == WeightsFrom::row_weights) combine.row_weights = weights.as<float>();
    const TestStream stream;
    std::vector<std::uint64_t> early;
    BareLanes lanes(rank, c);
    for (std::uint64_t number = 1; number <= kLate; ++number) {
      lanes.call(dispatch, combine, c.split_phases, stream);
      // A launch on a full stream blocks inside the driver, where ranks that share a device could deadlock.
      if (number % 50 == 0) stream.synchronize();
      if (number == kEarly) early = lanes.words();
    }
    const std::vector<std::uint64_t> late = lanes.words();
    rank.barrier();  // no rank may free memory while kernels of others can write to it
    for (std::size_t word = 0; word < late.size(); ++word) {
      require(is_unchanged_or_counter(early[word], late[word], kEarly, kLate), "word ", word, " of ",
              late.size(), " was ", early[word], " after ", 2 * kEarly, " calls and is ", late[word],
              " after ", 2 * kLate);
    }
  });
}

TestCase state_case(std::uint64_t number) {
  TestCase c;
  c.seed = seed_of(number);
  c.config.backend = BackendKind::cuda;
  c.config.experts = 9;
  c.config.top_k = 4;
  c.config.hidden = 256;
  c.config.max_tokens = 24;
  c.masked = 0.1;
  c.full = true;
  return c;
}

TEST_F(CudaState, OnlyCountersChangeOver100000Calls) {
  require_only_counters_change(state_case(3));
}

TEST_F(CudaState, OnlyCountersChangeOver100000CallsInPhases) {
  TestCase c = state_case(4);
  c.split_phases = true;
  require_only_counters_change(c);
}

TEST_F(CudaState, OnlyCountersChangeOver100000CallsOnEachOfTwoLanes) {
  TestCase c = state_case(5);
  c.config.lanes = 2;
  c.config.format = Format::fp8_e4m3();
  c.config.layout = Layout::expert_padded;
  c.reduction = c.config.reduction = Reduction::exact;
  require_only_counters_change(c);
}

TEST_F(CudaState, OnlyCountersChangeOver100000CallsOfManyTokens) {
  TestCase c = state_case(6);
  c.config.max_tokens = 300;
  c.config.format = Format::fp8_e4m3({.power_of_two = true, .packed = true});
  c.config.layout = Layout::rank_major;
  c.weights_from = WeightsFrom::none;
  c.split_phases = true;
  require_only_counters_change(c);
}

TEST_F(CudaState, OnlyCountersChangeOver100000UnreducedCalls) {
  TestCase c = state_case(7);
  c.reduction = c.config.reduction = Reduction::unreduced;
  c.weights_from = WeightsFrom::none;
  require_only_counters_change(c);
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
