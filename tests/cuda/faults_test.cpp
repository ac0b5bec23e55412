// Ranks are processes of one host. One of them stalls, throws or is killed: between calls, between the phases
// of a call, or with kernels in flight. The others get a typed error in time, and a new group works.
//
// The test process never starts the driver, because it forks ranks.
#include <signal.h>

#include <array>
#include <thread>

#include "cuda/fault_test.hpp"

namespace ferry::contract {
namespace {

constexpr double kDeadline = 1.5;

enum class Fault { stall, raise, kill };
enum class When { before_dispatch, between_phases, after_dispatch, in_flight };

constexpr std::array kFaults = {Fault::stall, Fault::raise, Fault::kill};
constexpr std::array kMoments = {When::before_dispatch, When::between_phases, When::after_dispatch,
                                 When::in_flight};

std::string name_of(Fault fault) {
  return fault == Fault::stall ? "Stall" : fault == Fault::raise ? "Throw" : "Kill";
}

std::string name_of(When when) {
  switch (when) {
    case When::before_dispatch:
      return "BeforeDispatch";
    case When::between_phases:
      return "BetweenPhases";
    case When::after_dispatch:
      return "AfterDispatch";
    case When::in_flight:
      break;
  }
  return "InFlight";
}

// The time limit for the error, in seconds. A rank that throws counts as lost only after it freed its device
// memory.
double seconds_for(Fault fault) {
  return fault == Fault::stall ? kDeadline + 1 : fault == Fault::raise ? 1.5 : 1;
}

struct DeliberateFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using CudaFaults = FaultTest<std::tuple<When, Fault>>;

void fail(Fault fault) {
  if (fault == Fault::stall) std::this_thread::sleep_for(std::chrono::duration<double>(2 * kDeadline + 1));
  if (fault == Fault::raise) throw DeliberateFailure("deliberate failure");
  if (fault == Fault::kill) raise(SIGKILL);
}

// The rank that fails, where, and how.
struct Failing {
  int victim;
  When when;
  Fault fault;
};

// Calls until an error is thrown; the victim fails in the third round. Stores when that round started.
void call_until_failure(const Rank& rank, SyncExchange& exchange, const TestCase& c, const Failing& failing,
                        std::atomic<Clock::rep>* started) {
  const auto [victim, when, fault] = failing;
  for (int index = 0; index < 5; ++index) {
    const StepInputs step = make_inputs(c, index);
    const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
    if (index == 2) *started = Clock::now().time_since_epoch().count();
    const bool fails = rank.index() == victim && index == 2;
    if (fails && when == When::before_dispatch) fail(fault);
    DispatchRun dispatch(exchange, c, step);
    if (fails && when == When::in_flight) {
      // Enqueued without waiting: the kernels still run when the process ends.
      static_cast<ferry::Exchange&>(exchange).dispatch(dispatch.tokens(), dispatch.ids(), dispatch.weights(),
                                                       {.call = {.stream = device::stream(rank.index())}});
      fail(fault);
    }
    dispatch.send();
    if (fails && when == When::between_phases) fail(fault);
    dispatch.receive();
    if (fails && when == When::after_dispatch) fail(fault);
    CombineRun(exchange, c, step, expert_outputs, dispatch.received().plan, dispatch.received().weight).run();
  }
}

void run_rank(const Rank& rank, const TestCase& c, const Failing& failing, RankReport& report) {
  const device::RankScope work(rank.index());
  SyncExchange exchange(rank, c.config);
  std::atomic<Clock::rep> started{0};
  try {
    call_until_failure(rank, exchange, c, failing, &started);
    return;
  } catch (const TimeoutError& error) {
    record_failure(report, error);
  } catch (const PeerLostError& error) {
    record_failure(report, error);
  }
  report.seconds = seconds_since(Clock::time_point(Clock::duration(started)));
  report.later_calls_throw = throws_again(exchange, c);
}

// Runs the case until the victim fails, then one in a new group. Checks every survivor's report.
void run_failing(const TestCase& c, const Failing& failing, RankReport* reports) {
  Group group = Group::processes(c.ranks);
  group.set_deadline(20);
  try {
    group.run([&](Rank rank) { run_rank(rank, c, failing, reports[rank.index()]); });
    ADD_FAILURE() << "no rank failed";
  } catch (const std::exception& error) {
    // The launcher kills a rank that sleeps on two seconds after the group's failure.
    const bool killed =
        std::string(error.what()).find("was killed because it did not end") != std::string::npos;
    EXPECT_EQ(killed, failing.fault == Fault::stall) << error.what();
  }
  for (int rank = 0; rank < c.ranks; ++rank) {
    if (rank == failing.victim) continue;
    SCOPED_TRACE(str("rank ", rank));
    expect_failure(reports[rank], rank,
                   failing.fault == Fault::stall ? ErrorCode::timeout : ErrorCode::peer_lost,
                   seconds_for(failing.fault), failing.victim);
  }
  // New processes form a group on the same devices.
  TestCase again = c;
  again.ranks = c.ranks - 1;
  EXPECT_TRUE(run_case(kCudaProcesses, again));
}

TEST_P(CudaFaults, PeersGetATypedErrorInTimeAndANewGroupWorks) {
  const auto [when, fault] = GetParam();
  run_failing(fault_case(kDeadline), {kVictim, when, fault}, reports_);
}

// Rank r uses GPU r where there are as many.
using CudaVictims = FaultTest<int>;

TEST_P(CudaVictims, IsKilledWithKernelsInFlight) {
  run_failing(fault_case(kDeadline, kMostRanks), {GetParam(), When::in_flight, Fault::kill}, reports_);
}

std::string case_name(const testing::TestParamInfo<CudaFaults::ParamType>& test) {
  return name_of(std::get<0>(test.param)) + name_of(std::get<1>(test.param));
}

INSTANTIATE_TEST_SUITE_P(Processes, CudaFaults,
                         testing::Combine(testing::ValuesIn(kMoments), testing::ValuesIn(kFaults)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Ranks, CudaVictims, testing::Range(0, kMostRanks));

}  // namespace
}  // namespace ferry::contract
