// A rank that is killed inside a function of a program.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "ferry/evaluator.hpp"
#include "harness/socket_engine.hpp"
#include "program/two_batches.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

constexpr int kVictim = 1;
constexpr double kLongestWait = 20;  // seconds, for the other ranks to come as far as they can

struct DeathRecord {
  std::array<std::atomic<int>, 3> calls{};        // of the function, by rank
  std::array<std::array<char, 200>, 3> errors{};  // by rank
};

// Whether the others are past the last step before the second micro-batch's combine.
bool others_have_called_twice(const DeathRecord& record) {
  return record.calls[0] == 2 && record.calls[2] == 2;
}

void run_until_a_rank_dies(const Rank& rank, const Config& config, DeathRecord& record) {
  const auto me = static_cast<std::size_t>(rank.index());
  const Program program = program_in_two_batches();
  Exchange exchange(rank, config);
  Evaluator layer(program, exchange,
                  {{"experts", [&](auto inputs, auto outputs) {
                      ++record.calls[me];
                      outputs[0]->data = inputs[0]->received.data;
                      if (rank.index() != kVictim) return;
                      const Stopwatch watch;
                      while (!others_have_called_twice(record) && watch.seconds() < kLongestWait)
                        sleep_seconds(0.001);
                      std::raise(SIGKILL);
                    }}});
  const std::vector<float> x(16, 1.0f);
  const std::vector<std::int32_t> ids = {0, 1, 2, 0};
  const auto given = {ProgramValue::tokens(x.data(), 4, DType::fp32), ProgramValue::ids(ids.data(), 4)};
  try {
    layer.run(std::span(given));
  } catch (const PeerLostError& error) {
    std::string(error.what()).copy(record.errors[me].data(), record.errors[me].size() - 1);
    throw;
  }
}

void expect_errors(const DeathRecord& record) {
  for (const int rank : {0, 2}) {
    const std::string text = record.errors[static_cast<std::size_t>(rank)].data();
    EXPECT_TRUE(text.starts_with("program moe, step y.0 (combine_receive): ") ||
                text.starts_with("program moe, step y.sent.1 (combine_send): "))
        << "rank " << rank << ": " << text;
  }
}

// The victim is killed in its first function, before it has sent anything of its combines. The others are
// then between the experts of the second micro-batch and the receive phase that needs its rows: that phase
// ends with the error, or the send phase before it, where the death is known already.
void expect_the_error_at_its_step(const std::vector<int>& nodes, const Config& config) {
  const SharedValue<DeathRecord> record;
  EXPECT_THROW(Group::processes(Topology(nodes)).run([&](const Rank& rank) {
    run_until_a_rank_dies(rank, config, *record);
  }),
               PeerLostError);
  expect_errors(*record);
}

Config death_config(BackendKind backend, Hops hops) {
  return {.experts = 3,
          .top_k = 1,
          .hidden = 4,
          .max_tokens = 4,
          .backend = backend,
          .hops = hops,
          .format = Format::fp32(),
          .combine_type = DType::fp32,
          .lanes = 2};
}

TEST(ProgramDeath, EndsTheRunOfTheOthersAtTheStepThatNeedsTheRank) {
  expect_the_error_at_its_step({0, 0, 0}, death_config(BackendKind::cpu, Hops::one));
}

// Each rank is a process of its own that the test has forked, with functions of the caller as its engine.
TEST(ProgramDeath, OverAnEngineOfTheCaller) {
  constexpr int kRanks = 3;
  const SharedValue<DeathRecord> record;
  const TestBootstrap meeting(kRanks);
  SocketEngine engine(kRanks);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < kRanks; ++rank) {
    processes.push_back(fork());
    if (processes.back() != 0) continue;
    engine.close_but(rank);
    int status = 1;
    try {
      Group::custom(meeting.bootstrap(rank), engine.functions(rank)).run([&](const Rank& member) {
        run_until_a_rank_dies(member, death_config(BackendKind::collective, Hops::one), *record);
      });
    } catch (const PeerLostError&) {
      status = 0;
    } catch (const std::exception& error) {
      std::cerr << "rank " << rank << ": " << error.what() << std::endl;
    }
    _exit(status);
  }
  engine.close_but(-1);
  for (int rank = 0; rank < kRanks; ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(processes[static_cast<std::size_t>(rank)], &status, 0),
              processes[static_cast<std::size_t>(rank)]);
    if (rank == kVictim)
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    else
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
  }
  expect_errors(*record);
}

// The victim is rank 0's relay.
TEST(ProgramDeath, OfARelayInTwoHops) {
  expect_the_error_at_its_step({0, 1, 1}, death_config(BackendKind::cpu, Hops::two));
}

}  // namespace
}  // namespace ferry::test
