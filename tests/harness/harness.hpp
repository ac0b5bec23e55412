// Runs the body of a test as every rank of a group, for each backend and kind of group.
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

namespace ferry::contract {

// What ranks are: threads or processes of one body, or processes of all that is played
// (persistent_ranks.hpp).
enum class RanksAre { threads, processes, persistent_processes };

// Who runs a test.
struct Setup {
  BackendKind backend = BackendKind::cpu;
  RanksAre ranks = RanksAre::threads;
};

std::string name_of(const Setup& setup);

// The device backend, if this build has it.
std::vector<Setup> device_setups(RanksAre ranks);

// Why a setup cannot run here; empty: it can.
std::string why_not(const Setup& setup);

// Numbers of ranks to play with.
inline constexpr int kGroupSizes[] = {1, 2, 3, 4, 8};

// A seed of its own for each number of a test.
std::uint64_t seed_of(std::uint64_t number);

// Runs `body` as every rank; a failure becomes a failure of the running test that says what was played.
void run_ranks(const Setup& setup, int ranks, const std::string& what, const std::function<void(Rank)>& body);

// One dispatch and one combine of a case, compared with the reference on every rank. False: the test has
// failed.
bool play(const Setup& setup, Case c);

// The same with these inputs instead of the case's own.
bool play(const Setup& setup, const Case& c, const Step& step);

// More of one exchange for each case: two steps, a dispatch by the plan kept from the first, route values,
// traffic and load counts. All cases of the same number of ranks, played by one group. False: the test has
// failed.
bool play_sequences(const Setup& setup, const std::vector<Case>& cases);

// For bodies of run_ranks. Dispatch and combine; returns a copy of the plan.
Plan play_step(Exchange& exchange, const Case& c, const Step& step, const oracle::Outcome& outcome);

// Carries values to the rows by a plan of `step`.
void play_route_values(Exchange& exchange, const Case& c, const Step& step, const Plan& plan);

class Contract : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override;
  void TearDown() override;

  Case small_case(std::uint64_t number) const;

  // Cases with the same number of ranks are played by one group, each with an exchange of its own.
  void add(const Case& c) { added_.push_back(c); }
  void play_added();

  bool play(const Case& c, const Step& step) const { return contract::play(GetParam(), c, step); }
  void run(int ranks, const std::string& what, const std::function<void(Rank)>& body) const {
    run_ranks(GetParam(), ranks, what, body);
  }
  // A configuration with the backend under test.
  Config on_backend(Config config) const {
    config.backend = GetParam().backend;
    return config;
  }

 private:
  std::vector<Case> added_;
};

}  // namespace ferry::contract
