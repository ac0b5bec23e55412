// Two hops between pretended nodes of one host: every geometry and window, and what is particular to the
// launches that carry messages. Deadlines are short, because a launch that hangs keeps the device.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "cuda/device_test.hpp"
#include "cuda/fault_test.hpp"
#include "cuda/replays.hpp"
#include "cuda/test_hooks.hpp"
#include "oracle/expected.hpp"

namespace ferry::contract {
namespace {

constexpr double kDeadline = 3;

const std::vector<std::vector<int>> kNodes = {{0, 1},
                                              {0, 0, 1, 1},
                                              {0, 0, 0, 1},
                                              {0, 0, 0, 0, 1, 1, 1, 1},
                                              {0, 1, 2, 3, 0, 1, 2, 3},
                                              {0, 1, 1, 2, 2, 2, 2, 2}};

Setup two_hops(int window) {
  return {.backend = BackendKind::cuda, .rank_kind = RankKind::threads, .hops = Hops::two, .window = window};
}

TestCase hop_case(std::uint64_t number, const std::vector<int>& nodes, int window) {
  TestCase c;
  c.seed = seed_of(number);
  c.nodes = nodes;
  c.ranks = static_cast<int>(nodes.size());
  c.config.experts = 3 * c.ranks;
  c.config.top_k = 4;
  c.config.hidden = 256;
  c.config.max_tokens = 24;
  c.masked = 0.1;
  two_hops(window).choose_backend(c.config);
  c.config.deadline = kDeadline;
  return c;
}

using CudaTwoHops = DeviceTest;

class CudaTwoHopNodes : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  void SetUp() override {
    if (const std::string reason = skip_reason(two_hops(1)); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_P(CudaTwoHopNodes, RandomCases) {
  const auto [nodes, window] = GetParam();
  const std::vector<int>& labels = kNodes[static_cast<std::size_t>(nodes)];
  std::vector<TestCase> cases = {hop_case(static_cast<std::uint64_t>(10 * nodes), labels, window)};
  for (std::uint64_t drawn = 0, seed = 0; drawn < 2; ++seed) {
    TestCase c = draw_case(seed_of(1000 * static_cast<std::uint64_t>(nodes) + seed), CaseSize::small);
    if (c.ranks != static_cast<int>(labels.size())) continue;
    ++drawn;
    c.nodes = labels;
    c.config.deadline = kDeadline;
    cases.push_back(c);
  }
  run_sequences(two_hops(window), cases);
}

INSTANTIATE_TEST_SUITE_P(Nodes, CudaTwoHopNodes,
                         testing::Combine(testing::Range(0, static_cast<int>(kNodes.size())),
                                          testing::Values(1, 7, 64)),
                         [](const auto& parameter) {
                           return "nodes" + std::to_string(std::get<0>(parameter.param)) + "_window" +
                                  std::to_string(std::get<1>(parameter.param));
                         });

// Staging does not grow with the tokens: phases, with N far above the window.
TEST_F(CudaTwoHops, ManyTokensPassThroughAWindowOfOne) {
  for (const bool split : {false, true}) {
    TestCase c = hop_case(1, {0, 0, 1, 1}, 1);
    c.config.max_tokens = 600;
    c.full = true;
    c.split_phases = split;
    run_sequences(two_hops(1), {c});
  }
}

TEST_F(CudaTwoHops, StagingDoesNotGrowWithTokens) {
  TestCase c = hop_case(2, {0, 0, 1, 1}, 16);
  const Topology topology(c.nodes);
  const Sizes few = size_of(c.config, topology, 1);
  c.config.max_tokens *= 100;
  const Sizes many = size_of(c.config, topology, 1);
  EXPECT_EQ(few.dispatch_staging, many.dispatch_staging);
  EXPECT_EQ(few.signals, many.signals);
  EXPECT_EQ(many.combine_staging, 0);
}

TEST_F(CudaTwoHops, AnyNumberOfBlocks) {
  for (const int limit : {1, 2, 5}) {
    TestCase c = hop_case(3, {0, 1, 1, 2, 2, 2, 2, 2}, 4);
    c.sm_limit = limit;
    run_sequences(two_hops(4), {c});
  }
}

TEST_F(CudaTwoHops, GraphsReadCurrentInputs) {
  const TestCase c = hop_case(5, {0, 0, 1, 1}, 7);
  replay_often(c, {.setup = two_hops(c.config.window), .replays = 40});
}

// A rank that never calls ends the call on all others.
TEST_F(CudaTwoHops, ARankThatIsMissingIsNamed) {
  TestCase c = hop_case(6, {0, 0, 1, 1}, 7);
  c.config.deadline = 0.5;
  const StepInputs step = make_inputs(c);
  std::array<std::atomic<int>, 4> peers{};
  for (std::atomic<int>& peer : peers) peer = -2;
  try {
    Group::threads(Topology(c.nodes, true)).run([&](Rank rank) {
      const device::RankScope scope(rank.topology().local_rank_of(rank.index()));
      make_streams(rank, rank.topology().local_rank_of(rank.index()));
      SyncExchange exchange(rank, c.config);
      DispatchRun(exchange, c, step).run();
      if (rank.index() == 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        return;
      }
      try {
        DispatchRun(exchange, c, step).run();
      } catch (const TimeoutError& error) {
        peers[static_cast<std::size_t>(rank.index())] = error.record.peer;
      }
    });
  } catch (const std::exception&) {
    // The group has failed, as it should.
  }
  for (const int rank : {0, 1, 3}) EXPECT_EQ(peers[static_cast<std::size_t>(rank)], 2) << "rank " << rank;
}

// A role of one rank stops in the middle of a call, as that of a lost relay does. All ranks are threads of
// this process, which goes on with other groups.
TEST_F(CudaTwoHops, ARoleThatStopsIsNamed) {
  if (!kTestHooks) GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  constexpr int kStopped = 2;
  for (const char* const point : {"hop_send", "hop_relay", "hop_receive"}) {
    SCOPED_TRACE(point);
    TestCase c = hop_case(8, {0, 0, 1, 1}, 1);
    c.config.deadline = 1;
    c.masked = 0;
    c.full = true;
    const StepInputs step = make_inputs(c);
    struct Outcome {
      double seconds = 0;  // until a TimeoutError or PeerLostError
      WaitRecord record;
      bool timed_out = false;
      std::string other_error;
    };
    std::array<Outcome, 4> outcomes;
    setenv("FERRY_STALL", point, 1);
    setenv("FERRY_STALL_RANK", std::to_string(kStopped).c_str(), 1);
    EXPECT_ANY_THROW(Group::threads(Topology(c.nodes, true)).run([&](Rank rank) {
      const device::RankScope scope(rank.topology().local_rank_of(rank.index()));
      make_streams(rank, rank.topology().local_rank_of(rank.index()));
      SyncExchange exchange(rank, c.config);
      Outcome& outcome = outcomes[static_cast<std::size_t>(rank.index())];
      const Clock::time_point started = Clock::now();
      try {
        // A rank that needs nothing from that role completes its first call. In the second it waits for ranks
        // that have not come, or loses one whose wait has ended.
        for (int call = 0; call < 2; ++call) DispatchRun(exchange, c, step).run();
      } catch (const TimeoutError& error) {
        outcome = {seconds_since(started), error.record, true, {}};
        throw;
      } catch (const PeerLostError& error) {
        outcome = {seconds_since(started), error.record, false, {}};
        throw;
      } catch (const std::exception& error) {
        outcome.other_error = error.what();
        throw;
      }
    }));
    unsetenv("FERRY_STALL");
    unsetenv("FERRY_STALL_RANK");
    bool is_named = false;
    for (std::size_t rank = 0; rank < 4; ++rank) {
      if (rank == kStopped) continue;
      const Outcome& outcome = outcomes[rank];
      const WaitRecord& record = outcome.record;
      SCOPED_TRACE(describe(record));
      EXPECT_GT(outcome.seconds, 0) << "no TimeoutError or PeerLostError: " << outcome.other_error;
      EXPECT_LT(outcome.seconds, c.config.deadline + 1);
      if (!outcome.timed_out) continue;
      // A rank behind the relay knows the source too. Waits in the first call end first, so every rank learns
      // which one has stopped.
      const bool names_stopped = record.peer == kStopped || record.via == kStopped;
      EXPECT_TRUE(names_stopped);
      const int named = record.peer >= 0 ? record.peer : record.via;
      EXPECT_EQ(record.node, named / 2);
      is_named = is_named || (names_stopped && record.role != WaitRole::none);
    }
    EXPECT_TRUE(is_named);
    use_other_backends(2);
  }
}

// Operations that two hops lack are refused by name.
TEST_F(CudaTwoHops, GathersAreRefusedByName) {
  const TestCase c = hop_case(7, {0, 1}, 7);
  const auto body = [&](const Rank& rank) {
    ferry::Exchange exchange(rank, c.config);
    GuardedBuffer rows(64), gathered(256);
    bool refused = false;
    try {
      exchange.all_gather_v(
          {.rows = rows.data(), .count = 1, .row_bytes = 16, .gathered = gathered.data(), .capacity = 8});
    } catch (const UnsupportedError& error) {
      refused = std::string(error.what()).find("hops") != std::string::npos;
    }
    require(refused, "all_gather_v in two hops must name the hops");
  };
  run_ranks(two_hops(c.config.window), c.ranks, describe(c), body, c.nodes);
}

}  // namespace
}  // namespace ferry::contract
