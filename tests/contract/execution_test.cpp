// Ways to call: one rank, split phases, lanes, step metadata.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "harness/harness.hpp"
#include "harness/jitter.hpp"
#include "oracle/expected.hpp"

namespace ferry::contract {
namespace {

TEST_P(Contract, OneRankRoundTripReturnsItsTokens) {
  TestCase c = small_case(1);
  c.ranks = 1;
  c.config.top_k = 3;
  c.config.reduction = Reduction::unreduced;
  c.masked = 0.2;
  c.full = true;
  const StepInputs step = make_inputs(c);
  run(1, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, step);
    dispatch.run();
    require_equal(exchange.wire_counts().dispatch_bytes, std::int64_t{0}, "bytes to other ranks");
    // Experts that return their input: every slot gets its own token back, a masked slot zeros.
    const std::int64_t row = c.config.hidden * 2;
    GuardedBuffer result(c.config.max_tokens * 3 * row);
    exchange.combine({dispatch.received().data}, dispatch.received().plan, {result.data()});
    std::vector<std::byte> expected;
    for (int i = 0; i < c.config.max_tokens * 3; ++i) {
      if (step.inputs.ranks[0].ids[i] < 0) expected.resize(expected.size() + row);
      if (step.inputs.ranks[0].ids[i] < 0) continue;
      const auto token = step.inputs.ranks[0].parts[0].begin() + i / 3 * row;
      expected.insert(expected.end(), token, token + row);
    }
    result.require_contents(expected, 2, "returned rows");
  });
}

TEST_P(Contract, SplitPhases) {
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
        TestCase c = small_case(ranks);
        c.ranks = ranks;
        c.config.experts = 3 * ranks;
        c.config.layout = layout;
        if (layout == Layout::rank_major) c.weights_from = WeightsFrom::none;
        c.reduction = c.config.reduction = layout == Layout::rank_major ? Reduction::partial : reduction;
        c.row_values = layout != Layout::rank_major;
        c.split_phases = true;
        add(c);
      }
    }
  }
  run_added();
}

TEST_P(Contract, PhasesAndFusedCallsMix) {
  for (int split_ranks = 0; split_ranks < 8; ++split_ranks) {  // a bit per rank
    for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
      TestCase c = small_case(split_ranks);
      c.ranks = 3;
      c.config.experts = 9;
      c.config.max_tokens = 20;
      c.full = true;
      c.reduction = c.config.reduction = reduction;
      c.row_values = true;
      const StepInputs step = make_inputs(c);
      const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
      run(c.ranks, str(describe(c), " in phases on ranks ", split_ranks), [&](Rank rank) {
        TestCase mine = c;
        mine.split_phases = (split_ranks >> rank.index() & 1) != 0;
        SyncExchange exchange(rank, c.config);
        for (int call = 0; call < 3; ++call) dispatch_and_combine(exchange, mine, step, expert_outputs);
      });
    }
  }
}

TEST_P(Contract, ReceivePhaseRunsInAnotherThread) {
  TestCase c = small_case(1);
  c.ranks = 3;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    for (int repeat = 0; repeat < 20; ++repeat) {
      DispatchRun dispatch(exchange, c, step);
      dispatch.send();
      std::thread([&] { dispatch.receive(); }).join();
      dispatch.compare();
      CombineRun combine(exchange, c, step, expert_outputs, dispatch.received().plan,
                         dispatch.received().weight);
      combine.send();
      std::thread([&] { combine.receive(); }).join();
      combine.compare();
    }
  });
}

TEST_P(Contract, PhasesOutOfOrderAreRefused) {
  TestCase c = small_case(1);
  c.config.lanes = 2;
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const auto refused = [](const std::function<void()>& call) { return !usage_error(call).empty(); };
    require(refused([&] { exchange.dispatch_receive(); }),
            "a receive phase without a send phase was accepted");
    require(refused([&] { exchange.combine_receive(1); }),
            "a combine's receive phase without a send phase was accepted");
    DispatchRun dispatch(exchange, c, step);
    dispatch.send();
    DispatchRun second(exchange, c, step);
    require(refused([&] { second.call(); }), "a dispatch between two phases was accepted");
    require(refused([&] { exchange.combine_receive(); }),
            "the receive phase of another operation was accepted");
    dispatch.receive();
    dispatch.compare();
  });
}

// Dispatches on both lanes, then combines on both, with the lanes in the opposite order on odd ranks.
TEST_P(Contract, TwoLanesRunInDifferentOrders) {
  TestCase c = small_case(1);
  c.ranks = 4;
  c.config.lanes = 2;
  c.caller_memory = false;
  TestCase lanes[] = {c, c};
  lanes[1].lane = 1;
  if (!Jitter::kAvailable) GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  const Jitter jitter;
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const int first = rank.index() % 2, second = 1 - first;
    for (int index = 0; index < 20; ++index) {
      const StepInputs steps[] = {make_inputs(c, 2 * index), make_inputs(c, 2 * index + 1)};
      const oracle::ExpertOutputs all_expert_outputs[] = {make_expert_outputs(c, steps[0]),
                                                          make_expert_outputs(c, steps[1])};
      DispatchRun dispatch0(exchange, lanes[0], steps[0]), dispatch1(exchange, lanes[1], steps[1]);
      DispatchRun* dispatches[] = {&dispatch0, &dispatch1};
      dispatches[first]->send();
      dispatches[second]->send();
      dispatches[second]->receive();
      dispatches[first]->receive();
      std::vector<CombineRun> combines;
      for (const int lane : {0, 1}) {
        dispatches[lane]->compare();
        const DispatchResult& rows = dispatches[lane]->received();
        combines.emplace_back(exchange, lanes[lane], steps[lane], all_expert_outputs[lane], rows.plan,
                              rows.weight);
      }
      combines[second].send();
      combines[first].send();
      combines[first].receive();
      combines[second].receive();
      for (const CombineRun& combine : combines) combine.compare();
    }
  });
}

TEST_P(Contract, TwoThreadsUseOneLaneEach) {
  TestCase c = small_case(1);
  c.ranks = 3;
  c.config.lanes = 2;
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    std::exception_ptr failures[2];
    const auto run_lane = [&](int lane) {
      try {
        TestCase mine = c;
        mine.lane = lane;
        mine.split_phases = lane == 1;
        for (int index = 0; index < 50; ++index) {
          const StepInputs step = make_inputs(mine, 2 * index + lane);
          dispatch_and_combine(exchange, mine, step, make_expert_outputs(mine, step));
        }
      } catch (...) {
        failures[lane] = std::current_exception();
      }
    };
    std::thread other(run_lane, 1);
    run_lane(0);
    other.join();
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  });
}

TEST_P(Contract, CountsMayBeReadWhileCallsRun) {
  TestCase c = small_case(2);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const StepInputs step = make_inputs(c, 1);
    const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
    dispatch_and_combine(exchange, c, step, expert_outputs);
    const LoadCounts one = exchange.load_counts();
    std::atomic<bool> done = false, torn = false;
    const auto read = [&] {
      while (!done) {
        const LoadCounts load = exchange.load_counts();
        exchange.wire_counts();
        if (GetParam().on_device()) continue;  // the device counts while it is read
        for (std::size_t e = 0; e < one.experts.size(); ++e)
          torn = torn || load.experts[e] != load.dispatches * one.experts[e];
      }
    };
    std::thread first(read), second(read);
    for (int repeat = 0; repeat < 30; ++repeat) dispatch_and_combine(exchange, c, step, expert_outputs);
    done = true;
    first.join();
    second.join();
    require(!torn, "routes were read that belong to no number of whole dispatches");
  });
}

TEST_P(Contract, StepMetadata) {
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8}) {
    TestCase c = small_case(ranks);
    c.ranks = ranks;
    run(ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      const StepMetadata* address = nullptr;
      Random random(c.seed);
      for (int call = 0; call < 20; ++call) {
        std::vector<std::int32_t> counts;
        for (int r = 0; r < ranks; ++r) counts.push_back(random.chance(0.3) ? 0 : random.below(100000));
        const StepMetadata* got = exchange.metadata(counts[rank.index()]);
        const StepMetadata expected = oracle::step_metadata(counts, rank.index());
        require_equal(got->sum, expected.sum, "sum");
        require_equal(got->prefix, expected.prefix, "prefix");
        require_equal(got->maximum, expected.maximum, "maximum");
        require(address == nullptr || got == address, "the address changed");
        address = got;
        GuardedBuffer mine(sizeof(StepMetadata));
        got = exchange.metadata(counts[rank.index()], 0, mine.as<StepMetadata>());
        require(std::memcmp(got, &expected, sizeof expected) == 0, "memory of the caller's");
        mine.require_guards("step metadata");
      }
    });
  }
}

}  // namespace
}  // namespace ferry::contract
