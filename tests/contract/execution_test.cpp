// Ways of calling: halves, lanes, metadata.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "harness/harness.hpp"
#include "harness/jitter.hpp"
#include "oracle/expected.hpp"

namespace ferry::contract {
namespace {

TEST_P(Contract, OneRankPermutesAndPermutesBack) {
  Case c = small_case(1);
  c.ranks = 1;
  c.config.top_k = 3;
  c.config.reduction = Reduction::unreduced;
  c.masked = 0.2;
  c.full = true;
  const Step step = make_step(c);
  run(1, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    DispatchRun played(exchange, c, step);
    played.run();
    require_equal(exchange.wire_counts().dispatch_bytes, std::int64_t{0}, "bytes to other ranks");
    // Experts that do nothing: every slot gets its own token back, a masked one zeros.
    const std::int64_t row = c.config.hidden * 2;
    Buffer result(c.config.max_tokens * 3 * row);
    exchange.combine({played.received().data}, played.received().plan, {result.data()});
    std::vector<std::byte> expected;
    for (int i = 0; i < c.config.max_tokens * 3; ++i) {
      if (step.global.ranks[0].ids[i] < 0) expected.resize(expected.size() + row);
      if (step.global.ranks[0].ids[i] < 0) continue;
      const auto token = step.global.ranks[0].parts[0].begin() + i / 3 * row;
      expected.insert(expected.end(), token, token + row);
    }
    result.require_image(expected, 2, "rows brought back");
  });
}

TEST_P(Contract, SplitHalves) {
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
        Case c = small_case(ranks);
        c.ranks = ranks;
        c.config.experts = 3 * ranks;
        c.config.layout = layout;
        if (layout == Layout::rank_major) c.weights_from = WeightsFrom::nowhere;
        c.reduction = c.config.reduction = layout == Layout::rank_major ? Reduction::partial : reduction;
        c.values = layout != Layout::rank_major;
        c.split = true;
        add(c);
      }
    }
  }
  play_added();
}

TEST_P(Contract, SomeRanksMayCallInHalvesAndOthersNot) {
  for (int split = 0; split < 8; ++split) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
      Case c = small_case(split);
      c.ranks = 3;
      c.config.experts = 9;
      c.config.max_tokens = 20;
      c.full = true;
      c.reduction = c.config.reduction = reduction;
      c.values = true;
      const Step step = make_step(c);
      const oracle::Outcome outcome = make_outcome(c, step);
      run(c.ranks, str(describe(c), " in halves on ranks ", split), [&](Rank rank) {
        Case mine = c;
        mine.split = (split >> rank.index() & 1) != 0;
        Exchange exchange(rank, c.config);
        for (int call = 0; call < 3; ++call) play_step(exchange, mine, step, outcome);
      });
    }
  }
}

TEST_P(Contract, TheReceiveHalfMayRunInAnotherThread) {
  Case c = small_case(1);
  c.ranks = 3;
  const Step step = make_step(c);
  const oracle::Outcome outcome = make_outcome(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    for (int repeat = 0; repeat < 20; ++repeat) {
      DispatchRun dispatch(exchange, c, step);
      dispatch.send();
      std::thread([&] { dispatch.receive(); }).join();
      dispatch.compare();
      CombineRun combine(exchange, c, step, outcome, dispatch.received().plan, dispatch.received().weight);
      combine.send();
      std::thread([&] { combine.receive(); }).join();
      combine.compare();
    }
  });
}

TEST_P(Contract, HalvesOutOfOrderAreRefused) {
  Case c = small_case(1);
  c.config.lanes = 2;
  const Step step = make_step(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    const auto refused = [](const auto& call) {
      try {
        call();
      } catch (const UsageError&) {
        return true;
      }
      return false;
    };
    require(refused([&] { exchange.dispatch_receive(); }), "a receive half without a send half");
    require(refused([&] { exchange.combine_receive(1); }), "a combine's receive half without a send half");
    DispatchRun dispatch(exchange, c, step);
    dispatch.send();
    DispatchRun second(exchange, c, step);
    require(refused([&] { second.call(); }), "a dispatch between two halves");
    require(refused([&] { exchange.combine_receive(); }), "the receive half of another operation");
    dispatch.receive();
    dispatch.compare();
  });
}

// d0, d1, c0, c1 with the lanes in another order on odd ranks.
TEST_P(Contract, TwoLanesInDifferentOrder) {
  Case c = small_case(1);
  c.ranks = 4;
  c.config.lanes = 2;
  c.caller_memory = false;
  Case lanes[] = {c, c};
  lanes[1].lane = 1;
  if (!Jitter::kAvailable) GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  const Jitter jitter;
  run(c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    const int first = rank.index() % 2, second = 1 - first;
    for (int index = 0; index < 20; ++index) {
      const Step steps[] = {make_step(c, 2 * index), make_step(c, 2 * index + 1)};
      const oracle::Outcome outcomes[] = {make_outcome(c, steps[0]), make_outcome(c, steps[1])};
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
        combines.emplace_back(exchange, lanes[lane], steps[lane], outcomes[lane], rows.plan, rows.weight);
      }
      combines[second].send();
      combines[first].send();
      combines[first].receive();
      combines[second].receive();
      for (const CombineRun& combine : combines) combine.compare();
    }
  });
}

TEST_P(Contract, TwoThreadsDriveALaneEach) {
  Case c = small_case(1);
  c.ranks = 3;
  c.config.lanes = 2;
  run(c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    std::exception_ptr failures[2];
    const auto drive = [&](int lane) {
      try {
        Case mine = c;
        mine.lane = lane;
        mine.split = lane == 1;
        for (int index = 0; index < 50; ++index) {
          const Step step = make_step(mine, 2 * index + lane);
          play_step(exchange, mine, step, make_outcome(mine, step));
        }
      } catch (...) {
        failures[lane] = std::current_exception();
      }
    };
    std::thread other(drive, 1);
    drive(0);
    other.join();
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  });
}

TEST_P(Contract, StepMetadata) {
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8}) {
    Case c = small_case(ranks);
    c.ranks = ranks;
    run(ranks, describe(c), [&](Rank rank) {
      Exchange exchange(rank, c.config);
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
        require(address == nullptr || got == address, "the address has changed");
        address = got;
      }
    });
  }
}

}  // namespace
}  // namespace ferry::contract
