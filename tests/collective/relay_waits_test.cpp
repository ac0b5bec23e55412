// A rank that stays behind in the first hop: the relay that waits for it gives up first, and the ranks behind
// the relay learn of both. Four ranks on two nodes: rank 2 is the relay of rank 0 on the second node, and
// rank 3 that of rank 1.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "collective/pair_engine.hpp"
#include "collective/two_hop_steps.hpp"
#include "ferry/ferry.hpp"
#include "group/fault_points.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

constexpr int kRanks = 4;
constexpr double kDeadline = 1.0;

// The rank that stays, in which of its calls with messages, and where.
std::atomic<int> staying = -1, calls_before = 0;
std::atomic<FaultPoint> stays_at = FaultPoint::hop_begin;
std::atomic<bool> released = false;

void stay(FaultPoint point, int rank) {
  if (rank != staying || point != stays_at || calls_before-- > 0) return;
  while (!released) sleep_seconds(0.001);
}

// How the call of a rank ended.
struct Ending {
  std::optional<WaitRecord> record;  // of a TimeoutError
  std::string text;
  double seconds = 0;
};

enum class Call { dispatch, combine };

FaultPoint begin_of(Call call) {
  return call == Call::dispatch ? FaultPoint::dispatch_begin : FaultPoint::combine_begin;
}

// Makes the call on four ranks. Those that do not stay give up; the others' endings are returned. In phases,
// every rank begins to receive at the same time.
std::array<Ending, kRanks> endings(BackendKind backend, Hops hops, Call call, int rank_that_stays, Form form,
                                   FaultPoint point = FaultPoint::hop_begin) {
  std::array<Ending, kRanks> all;
  std::atomic<int> ended = 0;
  released = false;
  stays_at = point;
  // Points that all calls pass, or only this one.
  calls_before = call == Call::combine && point != begin_of(call) ? 1 : 0;
  staying = rank_that_stays;
  set_fault_hook(stay);
  const auto body = [&](const Rank& rank) {
    Config config = two_hop_config(backend, kRanks, hops);
    config.deadline = kDeadline;
    Exchange exchange(rank, config);
    const Inputs inputs(config, rank.index(), config.max_tokens);
    Ending& mine = all[static_cast<std::size_t>(rank.index())];
    std::optional<DispatchResult> received;
    if (call == Call::combine) received = dispatch(exchange, inputs, Form::fused);
    rank.barrier();
    const Stopwatch watch;
    try {
      if (call == Call::dispatch) {
        dispatch(exchange, inputs, form);
      } else {
        std::vector<float> result;
        combine(exchange, *received, {.data = received->data, .type = DType::fp32}, inputs,
                Reduction::partial, form, result);
      }
    } catch (const TimeoutError& error) {
      mine = {.record = error.record, .text = error.what(), .seconds = watch.own_seconds()};
    } catch (const Error& error) {
      mine.text = error.what();
    }
    if (rank.index() != rank_that_stays && ++ended == kRanks - 1) released = true;
  };
  if (backend == BackendKind::cpu) {
    EXPECT_NO_THROW(Group::threads(Topology({0, 0, 1, 1})).run(body));
  } else {
    const PairEngine engine(kRanks);
    run_hosts_with_engine({0, 0, 1, 1}, [&](int rank) { return engine.functions(rank); }, body);
  }
  set_fault_hook(nullptr);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == rank_that_stays) continue;
    EXPECT_TRUE(all[static_cast<std::size_t>(rank)].record.has_value())
        << "rank " << rank << ": " << all[static_cast<std::size_t>(rank)].text;
    EXPECT_LT(all[static_cast<std::size_t>(rank)].seconds, kDeadline + 1);
  }
  return all;
}

WaitRecord record_of(const Ending& ending) {
  return ending.record.value_or(WaitRecord{});
}

using RelayWaits = testing::TestWithParam<BackendKind>;

// The relay and the rank behind it are on one node, so both get what the relay knows.
TEST_P(RelayWaits, EndBeforeThoseOfTheRanksBehindInDispatch) {
  const auto all = endings(GetParam(), Hops::two, Call::dispatch, 0, Form::fused);
  const Ending &relay = all[2], &behind = all[3];
  EXPECT_EQ(record_of(relay).peer, 0) << relay.text;
  EXPECT_EQ(record_of(relay).via, -1) << relay.text;
  EXPECT_EQ(record_of(relay).role, WaitRole::relay) << relay.text;
  EXPECT_EQ(record_of(relay).node, 0) << relay.text;
  // Another rank of its host may have given up first.
  EXPECT_TRUE(relay.text.find("rank 2, as relay, waited for rank 0 on node 0") != std::string::npos ||
              relay.text.find("on rank 2, a relay: ") != std::string::npos)
      << relay.text;
  EXPECT_EQ(record_of(behind).peer, 0) << behind.text;
  EXPECT_EQ(record_of(behind).role, WaitRole::receiver) << behind.text;
  EXPECT_EQ(record_of(behind).node, 0) << behind.text;
  EXPECT_EQ(record_of(behind).via, 2) << behind.text;
  EXPECT_EQ(behind.text.find("rank 3, as"), std::string::npos) << behind.text;
}

// The rank behind is on another node. On another host it knows the relay alone.
TEST_P(RelayWaits, EndBeforeThoseOfTheRanksBehindInCombine) {
  const auto all = endings(GetParam(), Hops::two, Call::combine, 3, Form::fused);
  const Ending &relay = all[2], &behind = all[0];
  EXPECT_EQ(record_of(relay).peer, 3) << relay.text;
  EXPECT_EQ(record_of(relay).via, -1) << relay.text;
  EXPECT_EQ(record_of(relay).role, WaitRole::relay) << relay.text;
  EXPECT_EQ(record_of(relay).node, 1) << relay.text;
  EXPECT_EQ(record_of(behind).role, WaitRole::receiver) << behind.text;
  EXPECT_EQ(record_of(behind).node, 1) << behind.text;
  EXPECT_EQ(record_of(behind).operation, Operation::combine) << behind.text;
  if (GetParam() == BackendKind::cpu) {
    EXPECT_EQ(record_of(behind).peer, 3) << behind.text;
    EXPECT_EQ(record_of(behind).via, 2) << behind.text;
  } else {
    EXPECT_EQ(record_of(behind).peer, -1) << behind.text;
    EXPECT_GE(record_of(behind).via, 2) << behind.text;  // or that of rank 1, which failed the host first
    EXPECT_NE(behind.text.find("by way of rank"), std::string::npos) << behind.text;
    EXPECT_LT(relay.seconds, behind.seconds);
  }
}

TEST_P(RelayWaits, EndFirstInPhasesToo) {
  const auto all = endings(GetParam(), Hops::two, Call::dispatch, 0, Form::together);
  EXPECT_EQ(record_of(all[2]).peer, 0) << all[2].text;
  EXPECT_EQ(record_of(all[3]).peer, 0) << all[3].text;
  EXPECT_EQ(record_of(all[3]).via, 2) << all[3].text;
}

// A relay that is late itself, in both directions. Other ranks wait for it as for a peer; if one of them is
// the first that gives up, the rank behind the relay learns that.
TEST_P(RelayWaits, NameTheRelay) {
  for (const Call call : {Call::dispatch, Call::combine}) {
    const auto all = endings(GetParam(), Hops::two, call, 2, Form::fused, FaultPoint::relay_holds);
    const Ending& behind = call == Call::dispatch ? all[3] : all[0];
    const WaitRecord record = record_of(behind);
    EXPECT_TRUE(record.via == 2 ? record.peer == -1 : record.peer == 2) << behind.text;
  }
}

// In one hop nothing is forwarded.
TEST_P(RelayWaits, NameNoRelayInOneHop) {
  for (const Call call : {Call::dispatch, Call::combine}) {
    for (const Ending& each : endings(GetParam(), Hops::one, call, 3, Form::fused, begin_of(call))) {
      if (!each.record.has_value()) continue;  // the rank that stays
      EXPECT_EQ(each.record->peer, 3) << each.text;
      EXPECT_EQ(each.record->via, -1) << each.text;
      EXPECT_EQ(each.record->role, WaitRole::none) << each.text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, RelayWaits, testing::Values(BackendKind::collective, BackendKind::cpu),
                         [](const auto& test) { return std::string(to_string(test.param)); });

}  // namespace
}  // namespace ferry::test
