// A rank that is killed inside a function of a program, between its dispatch and its combine: the others'
// runs end with the typed error, from run() or from synchronize().
#include <signal.h>

#include <cstring>
#include <vector>

#include "cuda/fault_test.hpp"
#include "ferry/evaluator.hpp"

namespace ferry::contract {
namespace {

constexpr int kRuns = 3, kDeadlyRun = 1;
constexpr std::int64_t kTokens = 8, kRowBytes = 2 * 256;

// The parameter: micro-batches.
using CudaProgramDeath = FaultTest<int>;

Config death_config(int batches) {
  return {.experts = kRanks,
          .top_k = 1,
          .hidden = static_cast<int>(kRowBytes / 2),
          .max_tokens = kTokens,
          .backend = BackendKind::cuda,
          .lanes = batches,
          .deadline = 5};
}

void run_until_a_rank_dies(const Rank& rank, int batches, RankReport& report) {
  const device::RankScope work(rank.index());
  ferry::Exchange exchange(rank, death_config(batches));
  const Program plain = parse_program(R"(
    program layer
    input x: tokens
    input ids: ids
    rows = dispatch(x, ids)
    out: outputs = call experts(rows)
    y = combine(out, rows)
    output y
  )");
  int number = 0;
  Evaluator layer(overlap(plain, batches), exchange,
                  {{"experts", [&](ProgramInputs inputs, ProgramOutputs outputs) {
                      outputs[0]->data = inputs[0]->received.data;
                      if (number == kDeadlyRun && rank.index() == kVictim) raise(SIGKILL);
                    }}});
  std::byte* const x = device::allocate(kTokens * kRowBytes);
  std::byte* const ids = device::allocate(kTokens * 4);
  std::memset(x, 0, static_cast<std::size_t>(kTokens * kRowBytes));
  for (std::int32_t token = 0; token < kTokens; ++token) {
    const std::int32_t expert = token % kRanks;
    std::memcpy(ids + std::int64_t{4} * token, &expert, 4);
  }
  const std::vector<ProgramValue> inputs = {
      ProgramValue::tokens(x, kTokens, DType::bf16),
      ProgramValue::ids(reinterpret_cast<const std::int32_t*>(ids), kTokens)};
  const Stream stream = device::stream(rank.index());
  const auto run = [&] {
    layer.run(inputs, stream);
    for (int lane = 0; lane < batches; ++lane) exchange.synchronize({.lane = lane, .stream = stream});
  };
  rank.barrier();
  Clock::time_point start;
  try {
    for (; number < kRuns; ++number) {
      start = Clock::now();
      run();
    }
    return;
  } catch (const PeerLostError& error) {
    record_failure(report, error);
  }
  report.seconds = seconds_since(start);
  try {
    run();
  } catch (const PeerLostError&) {
    report.later_calls_throw = true;
  }
}

TEST_P(CudaProgramDeath, EndsTheRunsOfTheOthersInTime) {
  Group group = Group::processes(kRanks);
  group.set_deadline(20);
  EXPECT_THROW(group.run([&](Rank rank) { run_until_a_rank_dies(rank, GetParam(), reports_[rank.index()]); }),
               PeerLostError);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kVictim) continue;
    SCOPED_TRACE(str("rank ", rank));
    EXPECT_EQ(static_cast<ErrorCode>(reports_[rank].code.load()), ErrorCode::peer_lost);
    EXPECT_EQ(reports_[rank].peer, kVictim);
    EXPECT_LT(reports_[rank].seconds, 1.0);
    EXPECT_TRUE(reports_[rank].later_calls_throw);
  }
}

INSTANTIATE_TEST_SUITE_P(Processes, CudaProgramDeath, testing::Values(1, 2));

}  // namespace
}  // namespace ferry::contract
