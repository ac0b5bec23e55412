// Ranks are processes of one host. A kernel of one rank stalls at a given point, and its process stays alive
// or is killed. The others get a typed error in time that names this rank, and no kernel is left running on
// any device.
//
// The test process never starts the driver, because it forks ranks.
#include <signal.h>

#include <array>
#include <cctype>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/fault_test.hpp"
#include "cuda/nvshmem/availability.hpp"
#include "cuda/test_hooks.hpp"

namespace ferry::contract {
namespace {

struct StallPoint {
  Operation operation;
  const char* point;
  std::string_view nodes = {};  // of the ranks, a digit each: in two hops
  BackendKind backend = BackendKind::cuda;

  std::vector<int> labels() const {
    std::vector<int> of_rank(nodes.empty() ? kRanks : nodes.size());
    for (std::size_t rank = 0; rank < nodes.size(); ++rank) of_rank[rank] = nodes[rank] - '0';
    return of_rank;
  }
};

// All points that each operation passes.
constexpr std::array kStallPoints = {
    StallPoint{Operation::dispatch, "header"},
    StallPoint{Operation::dispatch, "counts"},
    StallPoint{Operation::dispatch, "metadata"},
    StallPoint{Operation::dispatch, "row"},
    StallPoint{Operation::dispatch, "flag"},
    StallPoint{Operation::dispatch, "end_of_stream"},
    StallPoint{Operation::dispatch, "poll"},
    StallPoint{Operation::combine, "header"},
    StallPoint{Operation::combine, "route_values"},
    StallPoint{Operation::combine, "row"},
    StallPoint{Operation::combine, "flag"},
    StallPoint{Operation::combine, "end_of_stream"},
    StallPoint{Operation::combine, "poll"},
    // The roles of two hops. The rank that stalls is a relay, except where it receives.
    StallPoint{Operation::dispatch, "hop_send", "010"},
    StallPoint{Operation::dispatch, "hop_relay", "010"},
    StallPoint{Operation::dispatch, "hop_receive", "001"},
    StallPoint{Operation::combine, "hop_send", "010"},
    StallPoint{Operation::combine, "hop_relay", "010"},
    StallPoint{Operation::combine, "hop_receive", "001"},
};

// The roles over NVSHMEM. On nodes of one rank the relay of a rank's messages is the rank that they are for,
// and nobody but the relay sends sums.
constexpr std::array kStallPointsOfPuts = {
    StallPoint{Operation::dispatch, "hop_send", "01", BackendKind::nvshmem},
    StallPoint{Operation::dispatch, "hop_relay", "01", BackendKind::nvshmem},
    StallPoint{Operation::combine, "hop_relay", "01", BackendKind::nvshmem},
    StallPoint{Operation::combine, "hop_receive", "01", BackendKind::nvshmem},
};
constexpr std::array kStallPointsOfLargerNodes = {
    StallPoint{Operation::dispatch, "hop_receive", "0011", BackendKind::nvshmem},
    StallPoint{Operation::combine, "hop_send", "0011", BackendKind::nvshmem},
};

enum class Fate { stays, is_killed };  // of the process whose kernel stalls

constexpr double kKilledAfter = 0.5;  // seconds

using CudaStallPoints = FaultTest<std::tuple<StallPoint, Fate>>;

// Seconds. A killed rank must be detected before the deadline.
double deadline_of(Fate fate) {
  return fate == Fate::stays ? 1.5 : 6;
}
double seconds_for(Fate fate) {
  return fate == Fate::stays ? 2.5 : kKilledAfter + 1;
}

TestCase case_of(const StallPoint& stall, Fate fate) {
  TestCase c = fault_case(deadline_of(fate), static_cast<int>(stall.labels().size()));
  c.config.backend = stall.backend;
  // The blocks of a call of many tokens exchange their counts.
  c.config.max_tokens = std::string_view(stall.point) == "counts" ? 2048 : 48;
  if (!stall.nodes.empty()) {
    c.config.hops = Hops::two;
    c.config.window = 2;
    // With 1,024 tokens nvshmem has larger blocks.
    c.config.max_tokens = stall.backend == BackendKind::nvshmem && fate != Fate::stays ? 1024 : 8;
  }
  // With topk_weights, combine also sends weights: it passes the point "route_values".
  c.weights_from = WeightsFrom::topk_weights;
  // Rows are announced at the point "flag" only if a warp sends several: all but the last go through the
  // block's flag publisher.
  if (std::string_view(stall.point) == "flag") c.sm_limit = 2;
  return c;
}

// Calls until an error is thrown, after a pause each. A rank that stalls after sending everything is missed
// only in the next call.
void call_until_error(SyncExchange& exchange, const TestCase& c, Operation operation, const StepInputs& step,
                      const oracle::ExpertOutputs& expert_outputs, const Plan& plan, double pause) {
  for (int i = 0; i < 3; ++i) {
    if (pause > 0) std::this_thread::sleep_for(std::chrono::duration<double>(pause));
    if (operation == Operation::dispatch) {
      DispatchRun(exchange, c, step).run();
    } else {
      CombineRun(exchange, c, step, expert_outputs, plan, nullptr).run();
    }
  }
}

void run_rank(const Rank& rank, const TestCase& c, const StallPoint& stall, Fate fate, RankReport& report) {
  const bool victim = rank.index() == kVictim;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  // An exchange without a stall makes the plan, which is valid for every exchange of this configuration.
  Plan plan;
  {
    SyncExchange exchange(rank, c.config);
    plan = dispatch_and_combine(exchange, c, step, expert_outputs);
  }
  if (victim) setenv("FERRY_STALL", stall.point, 1);
  SyncExchange exchange(rank, c.config);
  if (victim && fate == Fate::is_killed) {
    // After this time the rank is waiting for its kernel.
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::duration<double>(kKilledAfter));
      raise(SIGKILL);
    }).detach();
  }
  // A rank polls only for what has not arrived: the others let the victim wait.
  const bool pauses = !victim && std::string_view(stall.point) == "poll";
  const Clock::time_point started = Clock::now();
  try {
    call_until_error(exchange, c, stall.operation, step, expert_outputs, plan, pauses ? 0.05 : 0);
  } catch (const TimeoutError& error) {
    record_failure(report, error);
  } catch (const PeerLostError& error) {
    record_failure(report, error);
  }
  report.seconds = seconds_since(started);
  report.later_calls_throw = throws_again(exchange, c);
}

TEST_P(CudaStallPoints, PeersGetATypedErrorInTimeAndEveryKernelEnds) {
  if (!kTestHooks) GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  const auto [stall, fate] = GetParam();
  const std::vector<int> labels = stall.labels();
  const auto ranks = static_cast<int>(labels.size());
  if (stall.backend == BackendKind::nvshmem) {
    if (const std::string reason = no_nvshmem_for(ranks); !reason.empty()) GTEST_SKIP() << reason;
  }
  const TestCase c = case_of(stall, fate);  // drawn before the fork: all ranks use the same seed
  Group group = Group::processes(Topology(labels, !stall.nodes.empty()));
  group.set_deadline(20);
  try {
    group.run([&, stall = stall, fate = fate](Rank rank) {
      const device::RankScope work(device_number(rank, stall.backend));
      RankReport& report = reports_[rank.index()];
      run_rank(rank, c, stall, fate, report);
      report.destroyed_exchange = true;
      // One rank is enough, on the GPU that it has used.
      if (stall.nodes.empty() || rank.index() != 0) return;
      use_other_backends(1);
      report.others_work = true;
    });
    EXPECT_EQ(fate, Fate::stays);
  } catch (const std::exception& error) {
    EXPECT_EQ(fate, Fate::is_killed) << error.what();
  }
  for (int rank = 0; rank < ranks; ++rank) {
    SCOPED_TRACE(str("rank ", rank));
    const RankReport& report = reports_[rank];
    if (rank == kVictim && fate == Fate::is_killed) {
      EXPECT_FALSE(report.destroyed_exchange);
      EXPECT_EQ(report.seconds, 0);  // its first call did not return
      continue;
    }
    expect_failure(report, rank, fate == Fate::stays ? ErrorCode::timeout : ErrorCode::peer_lost,
                   seconds_for(fate));
    EXPECT_TRUE(report.destroyed_exchange);
    if (stall.nodes.empty() || rank == kVictim) continue;
    EXPECT_EQ(report.node, labels[kVictim]);
    EXPECT_TRUE(rank != 0 || report.others_work);
  }
}

std::string stall_name(const testing::TestParamInfo<CudaStallPoints::ParamType>& test) {
  const auto& [stall, fate] = test.param;
  std::string operation = to_string(stall.operation), point = stall.point;
  operation[0] = static_cast<char>(std::toupper(operation[0]));
  point[0] = static_cast<char>(std::toupper(point[0]));
  if (!stall.nodes.empty()) point += "InTwoHops";
  return operation + point + (fate == Fate::stays ? "Stays" : "IsKilled");
}

INSTANTIATE_TEST_SUITE_P(Processes, CudaStallPoints,
                         testing::Combine(testing::ValuesIn(kStallPoints),
                                          testing::Values(Fate::stays, Fate::is_killed)),
                         stall_name);
INSTANTIATE_TEST_SUITE_P(Nvshmem, CudaStallPoints,
                         testing::Combine(testing::ValuesIn(kStallPointsOfPuts),
                                          testing::Values(Fate::stays, Fate::is_killed)),
                         stall_name);
// Under MPS, where the death of a process ends the work of all.
INSTANTIATE_TEST_SUITE_P(NvshmemNodesOfTwo, CudaStallPoints,
                         testing::Combine(testing::ValuesIn(kStallPointsOfLargerNodes),
                                          testing::Values(Fate::stays)),
                         stall_name);

}  // namespace
}  // namespace ferry::contract
