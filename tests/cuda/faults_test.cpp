// Ranks as processes of one host, one of which stalls, ends or is killed between calls, in the middle of one,
// or in a send half: the others get a typed error in time, and a new group works.
//
// This process never starts the driver: it forks.
#include <signal.h>

#include <array>
#include <thread>

#include "cuda/fault_test.hpp"

namespace ferry::contract {
namespace {

constexpr double kDeadline = 1.5;

enum class Fault { stall, raise, kill };
enum class Where { before_dispatch, between_halves, after_dispatch, in_flight };

constexpr std::array kFaults = {Fault::stall, Fault::raise, Fault::kill};
constexpr std::array kPositions = {Where::before_dispatch, Where::between_halves, Where::after_dispatch,
                                   Where::in_flight};

std::string name_of(Fault fault) {
  return fault == Fault::stall ? "Stall" : fault == Fault::raise ? "Throw" : "Kill";
}

std::string name_of(Where where) {
  switch (where) {
    case Where::before_dispatch:
      return "BeforeDispatch";
    case Where::between_halves:
      return "BetweenHalves";
    case Where::after_dispatch:
      return "AfterDispatch";
    case Where::in_flight:
      break;
  }
  return "InFlight";
}

// A rank that throws is lost once it has let go of what it held on the device.
double seconds_for(Fault fault) {
  return fault == Fault::stall ? kDeadline + 1 : fault == Fault::raise ? 1.5 : 1;
}

struct Planned : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using CudaFaults = FaultTest<std::tuple<Where, Fault>>;

void fail(Fault fault) {
  if (fault == Fault::stall) std::this_thread::sleep_for(std::chrono::duration<double>(2 * kDeadline + 1));
  if (fault == Fault::raise) throw Planned("planned");
  if (fault == Fault::kill) raise(SIGKILL);
}

// Calls until one fails; the victim fails in the third round.
void play(const Rank& rank, Exchange& exchange, const Case& c, Where where, Fault fault,
          std::atomic<Clock::rep>* began) {
  for (int index = 0; index < 5; ++index) {
    const Step step = make_step(c, index);
    const oracle::Outcome outcome = make_outcome(c, step);
    if (index == 2) *began = Clock::now().time_since_epoch().count();
    const bool fails = rank.index() == kVictim && index == 2;
    if (fails && where == Where::before_dispatch) fail(fault);
    DispatchRun dispatch(exchange, c, step);
    if (fails && where == Where::in_flight) {
      // Enqueued and not waited for: its kernels run while the process ends.
      static_cast<ferry::Exchange&>(exchange).dispatch(dispatch.tokens(), dispatch.ids(), dispatch.weights(),
                                                       {}, device::stream(rank.index()));
      fail(fault);
    }
    dispatch.send();
    if (fails && where == Where::between_halves) fail(fault);
    dispatch.receive();
    if (fails && where == Where::after_dispatch) fail(fault);
    CombineRun(exchange, c, step, outcome, dispatch.received().plan, dispatch.received().weight).run();
  }
}

void survive(const Rank& rank, const Case& c, Where where, Fault fault, Seen& seen) {
  const device::Work work(rank.index());
  Exchange exchange(rank, c.config);
  std::atomic<Clock::rep> began{0};
  try {
    play(rank, exchange, c, where, fault, &began);
    return;
  } catch (const TimeoutError& error) {
    note(seen, error);
  } catch (const PeerLostError& error) {
    note(seen, error);
  }
  seen.seconds = seconds_since(Clock::time_point(Clock::duration(began)));
  seen.later_calls_throw = throws_again(exchange, c);
}

TEST_P(CudaFaults, TheOthersGetATypedErrorInTimeAndANewGroupWorks) {
  const auto [where, fault] = GetParam();
  const Case c = fault_case(kDeadline);
  Group group = Group::processes(kRanks);
  group.set_deadline(20);
  try {
    group.run([&, where = where, fault = fault](Rank rank) {
      survive(rank, c, where, fault, seen_[rank.index()]);
    });
    EXPECT_EQ(fault, Fault::stall);
  } catch (const std::exception& error) {
    EXPECT_NE(fault, Fault::stall) << error.what();
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kVictim) continue;
    SCOPED_TRACE(str("rank ", rank));
    const Seen& seen = seen_[rank];
    EXPECT_EQ(static_cast<ErrorCode>(seen.code.load()),
              fault == Fault::stall ? ErrorCode::timeout : ErrorCode::peer_lost);
    EXPECT_EQ(seen.peer, kVictim);
    EXPECT_EQ(seen.waiting, rank);
    EXPECT_LT(seen.seconds, seconds_for(fault));
    EXPECT_TRUE(seen.later_calls_throw);
  }
  // The same processes are gone; others take their place on the same cards.
  Case again = c;
  again.ranks = kRanks - 1;
  EXPECT_TRUE(contract::play(kOnProcesses, again));
}

std::string case_name(const testing::TestParamInfo<CudaFaults::ParamType>& test) {
  return name_of(std::get<0>(test.param)) + name_of(std::get<1>(test.param));
}

INSTANTIATE_TEST_SUITE_P(Processes, CudaFaults,
                         testing::Combine(testing::ValuesIn(kPositions), testing::ValuesIn(kFaults)),
                         case_name);

}  // namespace
}  // namespace ferry::contract
