// The backend `collective` where it differs from backends with shared memory: what it sends through the
// engine, the order of lanes, and engines that are missing, fail or wait for ever. The contract suite covers
// the rest.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "collective/engine_ranks.hpp"
#include "ferry/ferry.hpp"
#include "harness/thread_engine.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

constexpr int kHidden = 64;
constexpr int kTokens = 12;
constexpr double kDeadline = 0.5;

Config small_config(int lanes = 1) {
  return {.experts = 6,
          .top_k = 2,
          .hidden = kHidden,
          .max_tokens = kTokens,
          .backend = BackendKind::collective,
          .combine_type = DType::fp32,
          .reduction = Reduction::exact,
          .lanes = lanes,
          .deadline = kDeadline};
}

// One lane's step of one rank: token t goes to experts t % 6 and (t + rank) % 6, which return what they got.
struct Step {
  int lane;
  std::vector<float> tokens, result;
  std::vector<std::int32_t> ids;
  DispatchResult rows;

  Step(int rank, int of_lane) : lane(of_lane), tokens(kTokens * kHidden), result(tokens.size()) {
    std::iota(tokens.begin(), tokens.end(), static_cast<float>(1000 * (2 * rank + lane)));
    for (int t = 0; t < kTokens; ++t) {
      ids.push_back(t % 6);
      ids.push_back((t + 1 + rank) % 6);
    }
  }

  Tokens given() const { return {.parts = {tokens.data()}, .count = kTokens, .type = DType::fp32}; }
  DispatchOptions options() const { return {.call = {.lane = lane}, .format = Format::fp32()}; }
  Ids given_ids() const { return ids.data(); }
  Outputs outputs() const { return {.data = rows.data, .type = DType::fp32}; }

  void dispatch(Exchange& exchange) { rows = exchange.dispatch(given(), given_ids(), nullptr, options()); }
  void send_dispatch(Exchange& exchange) { exchange.dispatch_send(given(), given_ids(), nullptr, options()); }
  void receive_dispatch(Exchange& exchange) { rows = exchange.dispatch_receive({.lane = lane}); }
  void combine(Exchange& exchange, Reduction reduction = Reduction::exact) {
    exchange.combine(outputs(), rows.plan, {.data = result.data(), .type = DType::fp32},
                     {.call = {.lane = lane}, .reduction = reduction});
  }
  void send_combine(Exchange& exchange) {
    exchange.combine_send(outputs(), rows.plan, {.data = result.data(), .type = DType::fp32},
                          {.call = {.lane = lane}});
  }
  // Every token comes back from two experts.
  void expect_doubled() const {
    for (std::size_t i = 0; i < tokens.size(); ++i) ASSERT_EQ(result[i], 2 * tokens[i]) << "element " << i;
  }
};

Config fp32_config(int lanes = 1) {
  Config config = small_config(lanes);
  config.format = Format::fp32();
  return config;
}

TEST(Collective, SendsTheMessagesAndOneBlockForEachPair) {
  constexpr int kRanks = 3;
  const ThreadEngine engine(kRanks);
  std::vector<std::vector<std::int64_t>> sent(kRanks);  // bytes of each transfer
  const auto counting = [&](int rank) {
    EngineFunctions functions = engine.functions(rank);
    functions.all_to_all_v = [all_to_all_v = functions.all_to_all_v, &list = sent[rank]](
                                 int lane, const void* from, const std::int64_t* bytes, const auto* offsets,
                                 void* to, const std::int64_t* received, const auto* received_offsets) {
      list.push_back(std::accumulate(bytes, bytes + kRanks, std::int64_t{0}));
      all_to_all_v(lane, from, bytes, offsets, to, received, received_offsets);
    };
    return functions;
  };
  expect_none(run_ranks(kRanks, counting, [&](Rank rank) {
    Exchange exchange(rank, fp32_config());
    Step step(rank.index(), 0);
    step.dispatch(exchange);
    step.combine(exchange);
    const WireCounts after_exact = exchange.wire_counts();
    step.combine(exchange, Reduction::partial);
    const WireCounts all = exchange.wire_counts();
    exchange.metadata(1);
    const std::vector<std::int64_t>& list = sent[rank.index()];
    ASSERT_EQ(list.size(), 7u);
    for (const std::size_t block : {2u, 4u, 6u}) EXPECT_EQ(list[block], list[0]) << "blocks differ";
    EXPECT_EQ(list[1], all.dispatch_bytes);
    EXPECT_EQ(list[3], after_exact.combine_bytes);
    EXPECT_EQ(list[5], all.combine_bytes - after_exact.combine_bytes);
    EXPECT_GT(list[1], 0);
  }));
}

// How fast a combine reads rows depends on where they begin in a page.
TEST(Collective, ReceivedRowsBeginAtAPage) {
  const ThreadEngine engine(2);
  expect_none(run_ranks(engine, 2, [](Rank rank) {
    for (const int experts : {6, 10, 66}) {
      Config config = fp32_config();
      config.experts = experts;
      Exchange exchange(rank, config);
      Step step(rank.index(), 0);
      step.dispatch(exchange);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(step.rows.data) % 4096, 0u) << experts << " experts";
      exchange.metadata(1);  // before a rank ends its exchange
    }
  }));
}

// Every rank sends on both lanes before any receives, odd ranks in the opposite order.
TEST(Collective, LanesMeetInAnyOrder) {
  constexpr int kRanks = 3;
  const ThreadEngine engine(kRanks);
  expect_none(run_ranks(engine, kRanks, [&](Rank rank) {
    Exchange exchange(rank, fp32_config(2));
    for (int round = 0; round < 10; ++round) {
      Step steps[] = {Step(rank.index(), 0), Step(rank.index(), 1)};
      const int first = (rank.index() + round) % 2, second = 1 - first;
      steps[first].send_dispatch(exchange);
      steps[second].send_dispatch(exchange);
      rank.barrier();
      steps[second].receive_dispatch(exchange);
      steps[first].receive_dispatch(exchange);
      steps[second].send_combine(exchange);
      steps[first].send_combine(exchange);
      rank.barrier();
      exchange.combine_receive();
      exchange.combine_receive({.lane = 1});
      for (const Step& step : steps) step.expect_doubled();
    }
  }));
}

TEST(Collective, AnotherOrderOfOrderedLanesIsRefusedOnEveryRank) {
  constexpr int kRanks = 3;
  const ThreadEngine engine(kRanks, true);
  expect_none(run_ranks(engine, kRanks, [&](Rank rank) {
    Exchange exchange(rank, fp32_config(2));
    Step steps[] = {Step(rank.index(), 0), Step(rank.index(), 1)};
    const int first = rank.index() == 1 ? 1 : 0, second = 1 - first;
    for (const bool split : {false, true}) {
      const auto expect_refused = [&](const std::function<void()>& call) {
        try {
          call();
          ADD_FAILURE() << "rank " << rank.index() << ": accepted";
        } catch (const UsageError& error) {
          EXPECT_NE(std::string(error.what()).find("the same order on all ranks"), std::string::npos)
              << error.what();
        }
      };
      if (split) {
        steps[first].send_dispatch(exchange);
        steps[second].send_dispatch(exchange);
        expect_refused([&] { steps[0].receive_dispatch(exchange); });
        expect_refused([&] { steps[1].receive_dispatch(exchange); });
      } else {
        expect_refused([&] { steps[first].dispatch(exchange); });
        expect_refused([&] { steps[second].dispatch(exchange); });
      }
      // In one order, fused and in phases, the lanes still work.
      steps[0].send_dispatch(exchange);
      steps[1].dispatch(exchange);
      steps[0].receive_dispatch(exchange);
      for (Step& step : steps) {
        step.combine(exchange);
        step.expect_doubled();
      }
    }
  }));
}

// Two exchanges whose blocks differ in size: an engine without lanes must not see two sizes in one transfer.
TEST(Collective, AnotherOrderOfExchangesIsRefusedOnEveryRank) {
  constexpr int kRanks = 3;
  const ThreadEngine engine(kRanks, true);
  expect_none(run_ranks(engine, kRanks, [&](Rank rank) {
    Config large = fp32_config();
    large.experts = 1500;
    Exchange exchanges[] = {Exchange(rank, fp32_config()), Exchange(rank, large)};
    Step steps[] = {Step(rank.index(), 0), Step(rank.index(), 0)};
    const int first = rank.index() == 1 ? 1 : 0, second = 1 - first;
    for (const int each : {first, second}) {
      try {
        steps[each].dispatch(exchanges[each]);
        ADD_FAILURE() << "rank " << rank.index() << ": accepted";
      } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what()).find("of another exchange on rank"), std::string::npos)
            << error.what();
      }
    }
    for (const int each : {0, 1}) {
      steps[each].dispatch(exchanges[each]);
      steps[each].combine(exchanges[each]);
      steps[each].expect_doubled();
    }
  }));
}

TEST(Collective, ARefusalEndsTheCallOfPeersInPhases) {
  constexpr int kRanks = 3;
  const ThreadEngine engine(kRanks);
  expect_none(run_ranks(engine, kRanks, [&](Rank rank) {
    Exchange exchange(rank, fp32_config());
    for (int round = 0; round < 3; ++round) {
      Step step(rank.index(), 0);
      const auto call = [&] {
        if (rank.index() == 1) {
          exchange.dispatch_send({.parts = {step.tokens.data()}, .count = kTokens + 1, .type = DType::fp32},
                                 step.given_ids(), nullptr, step.options());
        } else if (rank.index() == 0) {
          step.dispatch(exchange);
        } else {
          step.send_dispatch(exchange);
          step.receive_dispatch(exchange);
        }
      };
      EXPECT_THROW(call(), UsageError);
      step.dispatch(exchange);
      step.combine(exchange);
      step.expect_doubled();
    }
  }));
}

TEST(Collective, NeedsTheEngineThatTheConfigurationNames) {
  Group::threads(2).run([](Rank rank) { EXPECT_THROW(Exchange(rank, small_config()), UnsupportedError); });
  const ThreadEngine engine(2);
  expect_none(run_ranks(engine, 2, [](Rank rank) {
    Config config = small_config();
    config.engine = EngineKind::mpi;
    EXPECT_THROW(Exchange(rank, config), UsageError);
    config.engine = rank.index() == 0 ? EngineKind::custom : EngineKind::automatic;
    EXPECT_THROW(Exchange(rank, config), UsageError);
    config.engine = EngineKind::custom;
    EXPECT_EQ(Exchange(rank, config).config().engine, EngineKind::custom);
  }));
}

// One rank or all of them ask for it. No GPU is needed to refuse it.
TEST(Collective, HostMemoryIsRefusedToNcclOnEveryRank) {
  const ThreadEngine engine(2);
  for (const int asking : {0, 1, 2}) {
    expect_none(run_ranks(engine, 2, [&](Rank rank) {
      Config config = small_config();
      if (asking == 2 || rank.index() == asking) {
        config.engine = EngineKind::nccl;
        config.memory = MemoryKind::host;
      }
      try {
        Exchange exchange(rank, config);
        ADD_FAILURE() << "rank " << rank.index() << ": accepted";
      } catch (const Error& error) {
        EXPECT_EQ(error.code() == ErrorCode::unsupported, config.engine == EngineKind::nccl);
        EXPECT_NE(std::string(error.what()).find("pass memory automatic or device, or another engine"),
                  std::string::npos)
            << error.what();
      }
      Exchange exchange(rank, fp32_config());  // the group goes on
      Step step(rank.index(), 0);
      step.dispatch(exchange);
    }));
  }
}

// A rank that does not call: its peers' waits end at the deadline, in both forms.
TEST(Collective, WaitsEndAtTheDeadline) {
  for (const bool split : {false, true}) {
    const ThreadEngine engine(3);
    std::atomic<int> timeouts = 0;
    run_ranks(engine, 3, [&](Rank rank) {
      Exchange exchange(rank, fp32_config());
      Step step(rank.index(), 0);
      const auto start = std::chrono::steady_clock::now();
      if (rank.index() == 2) {
        while (timeouts < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      try {
        if (split) step.send_dispatch(exchange);
        split ? step.receive_dispatch(exchange) : step.dispatch(exchange);
        ADD_FAILURE() << "no timeout";
      } catch (const TimeoutError& error) {
        EXPECT_EQ(error.record.operation, Operation::dispatch);
        EXPECT_EQ(error.record.rank, rank.index());
        EXPECT_EQ(error.record.peer, 2);
        EXPECT_EQ(error.record.via, -1);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
      EXPECT_LT(waited.count(), kDeadline + 1);
      ++timeouts;
      EXPECT_THROW(exchange.metadata(1), TimeoutError);
    });
    EXPECT_EQ(timeouts, 2);
  }
}

TEST(Collective, AnEngineThatThrowsIsNamed) {
  const ThreadEngine engine(2);
  std::atomic<int> transfers = 0;
  const auto throwing = [&](int rank) {
    EngineFunctions functions = engine.functions(rank);
    if (rank == 1) {
      functions.all_to_all_v = [&, all_to_all_v = functions.all_to_all_v](auto... arguments) {
        if (++transfers == 2) throw std::runtime_error("the cable is out");
        all_to_all_v(arguments...);
      };
    }
    return functions;
  };
  const std::vector<std::string> errors = run_ranks(2, throwing, [&](Rank rank) {
    Exchange exchange(rank, fp32_config());
    Step step(rank.index(), 0);
    try {
      step.dispatch(exchange);
    } catch (const PeerLostError& error) {
      EXPECT_EQ(error.record.peer, 1);
      EXPECT_NE(std::string(error.what()).find("the cable is out"), std::string::npos) << error.what();
      throw;
    }
  });
  for (const std::string& error : errors) EXPECT_NE(error, "");
}

}  // namespace
}  // namespace ferry::test
