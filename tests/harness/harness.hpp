// The harness of the contract tests. Every test runs for each Setup: a backend, and threads or processes as
// ranks. A test in short:
//
//   TestCase c = small_case(1);                         // 1. the case: configuration, routing, options
//   const StepInputs step = make_inputs(c);             // 2. inputs of all ranks, and where rows must lie
//   const auto outputs = make_expert_outputs(c, step);  //    what the experts return
//   run(c.ranks, describe(c), [&](Rank rank) {          // 3. the body that every rank runs
//     SyncExchange exchange(rank, c.config);
//     dispatch_and_combine(exchange, c, step, outputs);  // 4. the calls; the oracle checks every byte
//   });
//
// add(c) and run_added() do all of this for many cases at once. DispatchRun and CombineRun are single calls,
// for tests that change a call before it runs or examine its results. Checks in a body throw (check.hpp):
// EXPECT would be lost in the process of a rank.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"
#include "harness/check.hpp"
#include "harness/combine_run.hpp"
#include "harness/dispatch_run.hpp"
#include "harness/step_inputs.hpp"
#include "harness/sync_exchange.hpp"
#include "harness/test_case.hpp"
#include "oracle/expected.hpp"

namespace ferry::contract {

// How the ranks of a test run.
enum class RankKind {
  threads,
  processes,             // forked for one body
  persistent_processes,  // forked once for all tests (persistent_ranks.hpp)
  engine_threads,  // threads that bring an engine (engine_ranks.hpp); it takes device memory if asked for
  engine_hosts,    // the same, on two simulated hosts; the engine takes only host memory
  mpi,             // processes that mpirun has started, this one among them
};

// The backend, group and memory that a test runs on.
struct Setup {
  BackendKind backend = BackendKind::cpu;
  RankKind rank_kind = RankKind::threads;
  MemoryKind memory = MemoryKind::automatic;  // with `collective`
  // `two`: cases without nodes of their own run on two simulated ones, which differ in size from three ranks
  // on, and whose ranks take turns.
  Hops hops = Hops::automatic;
  int window = 0;  // Config::window; -1: that of the case
  EngineKind engine = EngineKind::automatic;
  const Language* language = nullptr;  // the operations are those of its interface; null: of C++

  bool same_process() const { return rank_kind == RankKind::threads; }
  bool on_device() const { return contract::on_device(backend, memory); }
  bool over_device_engine() const { return on_device() && backend == BackendKind::collective; }
  // Transfer::gather.
  bool has_gathered_input() const;
  bool has_gathers() const { return !has_kernels(backend) || hops != Hops::two; }
  // Sets the backend and what it needs. The backend `cuda` adds by node only in two hops; Transfer::gather,
  // which makes the same results, tiles of scales and expert_indexed are left out where they are refused.
  void choose_backend(Config& config) const;
};

std::string describe(const Setup& setup);

// `collective` over NCCL, with ranks that mpirun has started; empty if this build has no device backend.
std::vector<Setup> nccl_setups();

// `nvshmem` in two hops, with ranks that mpirun has started; empty if this build has no device backend.
std::vector<Setup> nvshmem_setups();

// The cuda backend with ranks of this kind; empty if this build does not have it.
std::vector<Setup> device_setups(RankKind rank_kind);
// The same in two hops.
std::vector<Setup> relayed_device_setups();
// The backend collective on device memory; empty if this build does not have it.
std::vector<Setup> device_collective_setups();

// Why a setup cannot run here; empty if it can.
std::string skip_reason(const Setup& setup);

// The numbers of ranks that most tests cover.
inline constexpr int kGroupSizes[] = {1, 2, 3, 4, 8};

// A seed that depends on FERRY_SEED and `number`.
std::uint64_t seed_of(std::uint64_t number);

// The integer in an environment variable, or `otherwise` if it is not set.
int number_from_environment(const char* variable, int otherwise);

// Whether the tests can run this on any simulated nodes, and the backend adds by node.
bool simulates_nodes(const Setup& setup);

// True if mpirun started the ranks and FERRY_HOST_ID places them on simulated hosts.
bool has_simulated_hosts(const Setup& setup);

// True if a test may set TestCase::nodes. Under mpirun, run_ranks() skips a case unless its nodes are those
// on which mpirun has started the ranks.
bool takes_nodes(const Setup& setup);

// Collective, of ranks that are threads and share devices. A device takes work from 32 queues. What is behind
// a kernel that waits holds up what comes after it in the queue, so each rank needs a queue of its own.
// Streams get different queues if they are made one after the other. Each is also used once here: in two
// hops, calls that were the first work on their stream have timed out (docs/log/2026-11-26-gpu.md).
void make_streams(const Rank& rank, int device);

// Runs `body` as every rank. If it throws on any rank, the running test fails with a message that contains
// `what`. `nodes` [ranks]: the simulated node of each rank; empty: those that the kind of ranks has. Under
// mpirun the body runs only if there are `ranks` processes and `nodes`, if given, are theirs.
void run_ranks(const Setup& setup, int ranks, const std::string& what, const std::function<void(Rank)>& body,
               const std::vector<int>& nodes = {});

// Runs and checks one dispatch and one combine of a case on every rank. Returns false if it made the test
// fail.
bool run_case(const Setup& setup, TestCase c);

// The same with inputs other than the case's own.
bool run_case(const Setup& setup, const TestCase& c, const StepInputs& step);

// For a process of mpirun, after its last test.
void disconnect_mpi_process();

// For each case, on one exchange: two steps, a dispatch and combine by the plan of the first, and
// route_values; also checks the traffic and load counts. All cases must have the same ranks and nodes; one
// group runs them all, on one node if the setup cannot simulate nodes. Returns false if it made the test
// fail.
bool run_sequences(const Setup& setup, const std::vector<TestCase>& cases);

// For bodies of run_ranks: one checked dispatch and combine. Returns a copy of the plan.
Plan dispatch_and_combine(SyncExchange& exchange, const TestCase& c, const StepInputs& step,
                          const oracle::ExpertOutputs& expert_outputs);

// For bodies of run_ranks: one checked route_values and one return_values by a plan of `step`.
void check_route_values(SyncExchange& exchange, const TestCase& c, const StepInputs& step, const Plan& plan);

// How the messages of an exchange travel.
oracle::Travel travel_of(const SyncExchange& exchange);

// The fixture of all contract tests.
class Contract : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override;
  void TearDown() override;

  // A small configuration for the backend under test.
  TestCase small_case(std::uint64_t number) const;

  // run_added() runs all added cases. One group runs the cases with the same ranks and nodes, with an
  // exchange for each.
  void add(const TestCase& c) { added_.push_back(c); }
  void run_added();

  bool run_case(const TestCase& c, const StepInputs& step) const {
    return contract::run_case(GetParam(), c, step);
  }
  void run(int ranks, const std::string& what, const std::function<void(Rank)>& body) const {
    run_ranks(GetParam(), ranks, what, body);
  }
  // The same configuration for the backend under test.
  Config on_backend(Config config) const {
    GetParam().choose_backend(config);
    return config;
  }

 private:
  std::vector<TestCase> added_;
};

}  // namespace ferry::contract
