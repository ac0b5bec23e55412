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

// Calls until an error is thrown; the victim fails in the third round. Stores when that round started.
void call_until_failure(const Rank& rank, SyncExchange& exchange, const TestCase& c, When when, Fault fault,
                        std::atomic<Clock::rep>* started) {
  for (int index = 0; index < 5; ++index) {
    const StepInputs step = make_inputs(c, index);
    const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
    if (index == 2) *started = Clock::now().time_since_epoch().count();
    const bool fails = rank.index() == kVictim && index == 2;
    if (fails && when == When::before_dispatch) fail(fault);
    DispatchRun dispatch(exchange, c, step);
    if (fails && when == When::in_flight) {
      // Enqueued without waiting: the kernels still run when the process ends.
      static_cast<ferry::Exchange&>(exchange).dispatch(dispatch.tokens(), dispatch.ids(), dispatch.weights(),
                                                       {}, device::stream(rank.index()));
      fail(fault);
    }
    dispatch.send();
    if (fails && when == When::between_phases) fail(fault);
    dispatch.receive();
    if (fails && when == When::after_dispatch) fail(fault);
    CombineRun(exchange, c, step, expert_outputs, dispatch.received().plan, dispatch.received().weight).run();
  }
}

void run_rank(const Rank& rank, const TestCase& c, When when, Fault fault, RankReport& report) {
  const device::RankScope work(rank.index());
  SyncExchange exchange(rank, c.config);
  std::atomic<Clock::rep> started{0};
  try {
    call_until_failure(rank, exchange, c, when, fault, &started);
    return;
  } catch (const TimeoutError& error) {
    record_failure(report, error);
  } catch (const PeerLostError& error) {
    record_failure(report, error);
  }
  report.seconds = seconds_since(Clock::time_point(Clock::duration(started)));
  report.later_calls_throw = throws_again(exchange, c);
}

TEST_P(CudaFaults, PeersGetATypedErrorInTimeAndANewGroupWorks) {
  const auto [when, fault] = GetParam();
  const TestCase c = fault_case(kDeadline);
  Group group = Group::processes(kRanks);
  group.set_deadline(20);
  try {
    group.run([&, when = when, fault = fault](Rank rank) {
      run_rank(rank, c, when, fault, reports_[rank.index()]);
    });
    ADD_FAILURE() << "no rank failed";
  } catch (const std::exception& error) {
    // The launcher kills a rank that sleeps on two seconds after the group's failure.
    const bool killed =
        std::string(error.what()).find("was killed because it did not end") != std::string::npos;
    EXPECT_EQ(killed, fault == Fault::stall) << error.what();
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kVictim) continue;
    SCOPED_TRACE(str("rank ", rank));
    expect_failure(reports_[rank], rank, fault == Fault::stall ? ErrorCode::timeout : ErrorCode::peer_lost,
                   seconds_for(fault));
  }
  // New processes form a group on the same devices.
  TestCase again = c;
  again.ranks = kRanks - 1;
  EXPECT_TRUE(run_case(kCudaProcesses, again));
}

std::string case_name(const testing::TestParamInfo<CudaFaults::ParamType>& test) {
  return name_of(std::get<0>(test.param)) + name_of(std::get<1>(test.param));
}

INSTANTIATE_TEST_SUITE_P(Processes, CudaFaults,
                         testing::Combine(testing::ValuesIn(kMoments), testing::ValuesIn(kFaults)),
                         case_name);

}  // namespace
}  // namespace ferry::contract
