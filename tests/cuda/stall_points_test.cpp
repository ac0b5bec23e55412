// Ranks as processes of one host. A kernel of one stops at a point inside it, and its process goes on or is
// killed: the others get a typed error in time that names it, and no device is left with a kernel that waits.
//
// This process never starts the driver: it forks.
#include <signal.h>

#include <array>
#include <cctype>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "cuda/fault_test.hpp"

namespace ferry::contract {
namespace {

struct Stop {
  Operation operation;
  const char* point;
};

// All that the operation passes.
constexpr std::array kStops = {
    Stop{Operation::dispatch, "header"},
    Stop{Operation::dispatch, "metadata"},
    Stop{Operation::dispatch, "row"},
    Stop{Operation::dispatch, "flag"},
    Stop{Operation::dispatch, "end_of_stream"},
    Stop{Operation::dispatch, "poll"},
    Stop{Operation::combine, "header"},
    Stop{Operation::combine, "route_values"},
    Stop{Operation::combine, "row"},
    Stop{Operation::combine, "flag"},
    Stop{Operation::combine, "end_of_stream"},
    Stop{Operation::combine, "poll"},
};

enum class Then { stays, is_killed };

constexpr double kKilledAfter = 0.5;

using CudaStallPoints = FaultTest<std::tuple<Stop, Then>>;

// Killed ranks are found before any deadline.
double deadline_of(Then then) {
  return then == Then::stays ? 1.5 : 6;
}
double seconds_for(Then then) {
  return then == Then::stays ? 2.5 : kKilledAfter + 1;
}

Case case_of(const Stop& stop, Then then) {
  Case c = fault_case(deadline_of(then));
  c.config.max_tokens = 48;
  // The weights that others need for their sums travel in the combine.
  c.weights_from = WeightsFrom::home;
  // Warps that have several rows announce them through their block's publisher, but for the last.
  if (std::string_view(stop.point) == "flag") c.sm_limit = 2;
  return c;
}

// Calls until one fails: where a rank stops after it has sent all it has, it is missed in the next call.
void call_until_error(Exchange& exchange, const Case& c, Operation operation, const Step& step,
                      const oracle::Outcome& outcome, const Plan& plan) {
  for (int i = 0; i < 3; ++i) {
    if (operation == Operation::dispatch) {
      DispatchRun(exchange, c, step).run();
    } else {
      CombineRun(exchange, c, step, outcome, plan, nullptr).run();
    }
  }
}

void meet(const Rank& rank, const Case& c, const Stop& stop, Then then, Seen& seen) {
  const bool victim = rank.index() == kVictim;
  const Step step = make_step(c);
  const oracle::Outcome outcome = make_outcome(c, step);
  // An exchange in which nothing stops makes the plan: it is good for all of this configuration.
  Plan plan;
  {
    Exchange before(rank, c.config);
    plan = play_step(before, c, step, outcome);
  }
  if (victim) setenv("FERRY_STALL", stop.point, 1);
  Exchange exchange(rank, c.config);
  if (victim && then == Then::is_killed) {
    // By then the rank waits for its kernel.
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::duration<double>(kKilledAfter));
      raise(SIGKILL);
    }).detach();
  }
  const Clock::time_point began = Clock::now();
  try {
    call_until_error(exchange, c, stop.operation, step, outcome, plan);
  } catch (const TimeoutError& error) {
    note(seen, error);
  } catch (const PeerLostError& error) {
    note(seen, error);
  }
  seen.seconds = seconds_since(began);
  seen.later_calls_throw = throws_again(exchange, c);
}

TEST_P(CudaStallPoints, TheOthersGetATypedErrorInTimeAndEveryKernelEnds) {
  const auto [stop, then] = GetParam();
  const Case c = case_of(stop, then);  // of one seed for all ranks
  Group group = Group::processes(kRanks);
  group.set_deadline(20);
  try {
    group.run([&, stop = stop, then = then](Rank rank) {
      const device::Work work(rank.index());
      Seen& seen = seen_[rank.index()];
      meet(rank, c, stop, then, seen);
      seen.ended = true;
    });
    EXPECT_EQ(then, Then::stays);
  } catch (const std::exception& error) {
    EXPECT_EQ(then, Then::is_killed) << error.what();
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(str("rank ", rank));
    const Seen& seen = seen_[rank];
    if (rank == kVictim && then == Then::is_killed) {
      EXPECT_FALSE(seen.ended);
      EXPECT_EQ(seen.seconds, 0);  // its first call has not returned
      continue;
    }
    EXPECT_EQ(static_cast<ErrorCode>(seen.code.load()),
              then == Then::stays ? ErrorCode::timeout : ErrorCode::peer_lost);
    EXPECT_EQ(seen.peer, kVictim);
    EXPECT_EQ(seen.waiting, rank);
    EXPECT_LT(seen.seconds, seconds_for(then));
    EXPECT_TRUE(seen.later_calls_throw);
    EXPECT_TRUE(seen.ended);
  }
}

std::string name_of_stop(const testing::TestParamInfo<CudaStallPoints::ParamType>& test) {
  const auto& [stop, then] = test.param;
  std::string operation = to_string(stop.operation), point = stop.point;
  operation[0] = static_cast<char>(std::toupper(operation[0]));
  // "end_of_stream" as "EndOfStream".
  std::string camel;
  bool upper = true;
  for (const char c : point) {
    if (c != '_') camel += upper ? static_cast<char>(std::toupper(c)) : c;
    upper = c == '_';
  }
  return operation + camel + (then == Then::stays ? "Stays" : "IsKilled");
}

INSTANTIATE_TEST_SUITE_P(Processes, CudaStallPoints,
                         testing::Combine(testing::ValuesIn(kStops),
                                          testing::Values(Then::stays, Then::is_killed)),
                         name_of_stop);

}  // namespace
}  // namespace ferry::contract
