// Calls of CallRanks that carry values alone: route_values and return_values. The kernel is for groups of any
// size, so it runs in the program of wide kernels.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include "backends/cuda/operations/send_values.cuh"
#include "backends/cuda/two_hops/hop_call.hpp"
#include "harness/random.hpp"
#include "kernels_on_host/call_ranks.hpp"
#include "kernels_on_host/grid.hpp"
#include "oracle/combine.hpp"
#include "seed.hpp"

namespace ferry::cuda {

std::vector<std::vector<float>> CallRanks::run_values(Operation operation,
                                                      const std::vector<std::vector<float>>& from,
                                                      const std::vector<std::size_t>& sizes) {
  const bool returns = operation == Operation::return_values;
  std::vector<std::vector<float>> to;
  std::vector<RouteValuesArguments> calls;
  std::vector<HopArguments> hops;
  std::vector<std::vector<std::int32_t>> counts(ranks_.size());
  ++calls_;
  for (const std::size_t values : sizes) to.emplace_back(values + 1, -7.0f);
  for (int r = 0; r < size(); ++r) {
    const auto i = static_cast<std::size_t>(r);
    Rank& rank = ranks_[i];
    calls.push_back({.lane = rank.view,
                     .terms = AgreedOptions::of(operation),
                     .plan = at(rank.plan_memory),
                     .from = from[i].data(),
                     .to = to[i].data(),
                     .operation = operation});
    if (!topology_) continue;
    // As HopCarrier::carry_messages().
    DispatchArguments messages{};
    messages.lane = rank.view;
    messages.by_plan = true;
    place_messages(messages, r);
    calls.back().lane = messages.lane;
    HopArguments& hop = hops.emplace_back(hop_arguments(r, HopContent::messages));
    hop.operation = operation;
    hop.payload_bytes = 0;
    hop.metadata_bytes = static_cast<std::int32_t>(sizeof(LLPacket)) * config_.top_k;
    hop.sent_tokens = returns ? rank.plan.received_token : rank.plan.sent_tokens;
    for (int peer = 0; peer < size(); ++peer)
      counts[i].push_back(rank.plan.tokens_between[returns ? peer * size() + r : r * size() + peer]);
    hop.counts = counts[i].data();
    hop.memory.counts = nullptr;
  }
  const std::uint64_t seed = test::seed() + calls_;
  for (const Phase phase : {Phase::send, Phase::receive}) {
    on_host::Grid grid(seed + static_cast<std::uint64_t>(phase));
    std::deque<RouteValuesState> states(ranks_.size() * kBlocks);
    for (std::size_t r = 0; r < calls.size(); ++r) {
      calls[r].phase = topology_ ? phase : Phase::fused;
      grid.add(kBlocks, 32 * kValueWarps,
               [&calls, &states, r](unsigned block) { send_values(calls[r], &states[r * kBlocks + block]); });
    }
    grid.run();
    if (!topology_) break;
    if (phase == Phase::send) run_hops(hops, seed);
  }
  for (std::size_t r = 0; r < to.size(); ++r) {
    EXPECT_EQ(ranks_[r].error.call.value, 0u);
    EXPECT_EQ(to[r].back(), -7.0f) << "behind the values of rank " << r;
    to[r].pop_back();
  }
  return to;
}

void CallRanks::exchange_values(const contract::StepInputs& step) {
  contract::Random random(test::seed() + static_cast<std::uint64_t>(step.index));
  std::vector<std::vector<float>> routes(ranks_.size());
  oracle::ExpertOutputs outputs;
  std::vector<std::size_t> route_counts, row_counts;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    route_counts.push_back(step.positions.routes[r].size());
    row_counts.push_back(step.positions.ranks[r].rows.size());
    for (std::size_t i = 0; i < route_counts[r]; ++i)
      routes[r].push_back(static_cast<float>(random.uniform()));
    std::vector<float>& rows = outputs.ranks.emplace_back().row_values;
    for (std::size_t i = 0; i < row_counts[r]; ++i) rows.push_back(static_cast<float>(random.uniform()));
  }
  const auto to_rows = run_values(Operation::route_values, routes, row_counts);
  std::vector<std::vector<float>> row_values;
  for (const auto& rank : outputs.ranks) row_values.push_back(rank.row_values);
  const auto to_routes = run_values(Operation::return_values, row_values, route_counts);
  for (int r = 0; r < size(); ++r) {
    const auto i = static_cast<std::size_t>(r);
    EXPECT_EQ(to_rows[i], oracle::values_at_rows(step.positions, routes, r)) << "rows of rank " << r;
    EXPECT_EQ(to_routes[i], oracle::returned_row_values(step.positions, outputs, r))
        << "routes of rank " << r;
  }
}

}  // namespace ferry::cuda
