// The kernels of groups of more than 32 ranks, run on the host: whole calls of all ranks, blocks in any
// order, against the oracle.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include "backends/cuda/dispatch/block_state.cuh"
#include "backends/cuda/host/memory_layout.hpp"
#include "exchange/configuration.hpp"
#include "kernels_on_host/call_ranks.hpp"

namespace ferry::cuda {
namespace {

static_assert(kWide && kKernelRanks == 256);

contract::TestCase case_of(std::uint64_t number, int ranks) {
  contract::TestCase c = call_case(number, ranks);
  c.config.experts = 2 * ranks;
  c.config.top_k = 5;
  c.config.max_tokens = 6;
  c.config.hidden = 16;
  return c;
}

// 34: more ranks than a word of 32 bits has.
class WideKernels : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, WideKernels, testing::Values(3, 34));

TEST_P(WideKernels, InEveryForm) {
  const contract::TestCase c = case_of(1, GetParam());
  CallRanks ranks(c);
  ranks.run_step(0, {.generic = true});
  ranks.run_step(1, {.split_phases = true, .generic = true});
  ranks.run_step(2, {.count_on_device = true, .generic = true});
  // Uses the plan of the last step.
  const contract::StepInputs step = contract::make_inputs(c, 2),
                             other = contract::with_new_values(c, step, 3);
  ranks.dispatch(other, {.by_plan = true});
  ranks.dispatch(other, {.by_plan = true, .split_phases = true});
  ranks.combine(other, contract::make_expert_outputs(c, other), {.generic = true});
  ranks.exchange_values(other);
}

TEST_P(WideKernels, IntoTooLittleMemory) {
  for (const Layout layout : {Layout::expert_major, Layout::rank_major}) {
    if (layout == Layout::rank_major && GetParam() > 3) continue;  // takes long
    contract::TestCase c = case_of(7, GetParam());
    c.config.layout = layout;
    c.config.alignment = 1;
    CallRanks ranks(c);
    ranks.dispatch_past_row_limits(0, {.generic = true});
    ranks.dispatch_past_row_limits(1, {.split_phases = true, .generic = true});
    ranks.dispatch(contract::make_inputs(c, 2), {.generic = true});
  }
}

// A warp goes on counting from one group of tokens to the next.
TEST(WideKernel, WithManyTokensForTheWarps) {
  contract::TestCase c = case_of(6, 3);
  c.config.max_tokens = 150;
  c.full = true;
  CallRanks ranks(c);
  ranks.run_step(0, {.generic = true});
  const contract::StepInputs step = contract::make_inputs(c, 0),
                             other = contract::with_new_values(c, step, 1);
  ranks.dispatch(other, {.by_plan = true});
  ranks.combine(other, contract::make_expert_outputs(c, other), {.generic = true});
}

TEST_P(WideKernels, InRankMajor) {
  contract::TestCase c = case_of(2, GetParam());
  c.config.layout = Layout::rank_major;
  c.config.alignment = 1;
  c.weights_from = contract::WeightsFrom::none;
  CallRanks ranks(c);
  ranks.run_step(0, {.generic = true});
  c.config.capacity = 5;
  CallRanks small(c);
  small.run_step(1, {.generic = true});
}

TEST_P(WideKernels, InOtherFormatsAndTypes) {
  contract::TestCase c = case_of(3, GetParam());
  c.config.format = Format::fp8_e4m3();
  c.config.hidden = 128;
  c.config.layout = Layout::expert_padded;
  c.result = DType::fp32;
  c.weights_from = contract::WeightsFrom::topk_weights;
  c.row_values = true;
  CallRanks ranks(c);
  ranks.run_step(0, {.generic = true});
}

TEST_P(WideKernels, WithSharedExpertsAndDroppedRows) {
  contract::TestCase c = case_of(4, GetParam());
  c.config.shared_experts = 2;
  c.config.capacity = 20;
  c.config.local_slots = 5;
  CallRanks ranks(c);
  ranks.run_step(0, {.generic = true});
}

Config config_of(int ranks) {
  Config config;
  config.experts = 512;
  config.top_k = 8;
  config.hidden = 7168;
  config.max_tokens = 128;
  return complete_config(config, ranks);
}

TEST(WideKernel, MemoryFor256RanksAndARefusalOfMore) {
  const Config config = config_of(256);
  check_limits(config);
  LaneView view{};
  view.ranks = 256;
  view.experts = config.experts;
  view.groups = groups_of(config, 0);
  view.layout = config.layout;
  view.signals = device_signals(config);
  DispatchArguments call{};
  call.lane = view;
  EXPECT_LE(lay_out_block(&call), 227 << 10);  // what a block may have on Hopper
  // The flags of each rank's messages are its own.
  const DeviceSignals& signals = view.signals;
  EXPECT_EQ(signals.dispatch_flags(0, 255, config.max_tokens - 1) - signals.dispatch_flags(0, 0, 0),
            8 * kQuarters * (std::int64_t{256} * config.max_tokens - 1));
  EXPECT_LE(signals.header(1, 255) + signals.header_bytes, signals.end_of_stream_flag(0, 0, 0));
  EXPECT_LE(signals.bytes, device_layout(config).exchange.signals);
  EXPECT_EQ(lane_arrays(config, 255).joined - lane_arrays(config, 255).symmetric, 8 * 256);
  const RoutingTables tables = RoutingTables::at(nullptr, config.experts, 256);
  EXPECT_LE(reinterpret_cast<std::intptr_t>(tables.rank_of + config.experts),
            RoutingTables::bytes(config.experts, 256));
  try {
    check_limits(config_of(257));
    ADD_FAILURE() << "257 ranks are not refused";
  } catch (const UnsupportedError& error) {
    EXPECT_EQ(std::string(error.what()),
              "kernels serve groups of up to 256 ranks, got 257: use smaller groups, or the backend "
              "collective on host memory");
  }
}

// In phases, as calls in two hops run.
void run_two_hops(contract::TestCase c, const std::vector<int>& nodes) {
  c.nodes = nodes;
  c.ranks = static_cast<int>(nodes.size());
  c.config.experts = 2 * c.ranks;
  c.config.window = 2;
  c.row_values = true;
  c.config.reduction_level = ReductionLevel::node;
  CallRanks by_node(c);
  by_node.run_step(0, {.split_phases = true, .generic = true});
  c.config.reduction_level = ReductionLevel::rank;
  CallRanks by_rank(c);
  by_rank.run_step(1, {.split_phases = true, .generic = true});
  const contract::StepInputs step = contract::make_inputs(c, 1),
                             other = contract::with_new_values(c, step, 2);
  by_rank.dispatch(other, {.by_plan = true, .split_phases = true});
  by_rank.combine(other, contract::make_expert_outputs(c, other), {.split_phases = true, .generic = true});
  by_rank.exchange_values(other);
  by_rank.run_step(3, {.split_phases = true, .keeps_inputs = true, .generic = true});
}

TEST(WideKernel, TwoHopsOfFewRanks) {
  run_two_hops(case_of(6, 8), {0, 1, 1, 2, 2, 2, 2, 2});
}

TEST(WideKernel, TwoHopsOfManyRanks) {
  std::vector<int> nodes;
  for (int rank = 0; rank < 34; ++rank) nodes.push_back(rank % 5);
  contract::TestCase c = case_of(7, 34);
  c.nodes = nodes;
  c.config.max_tokens = 3;
  c.config.window = 2;
  c.config.reduction_level = ReductionLevel::node;
  CallRanks ranks(c);
  ranks.run_step(0, {.split_phases = true, .generic = true});
}

TEST(WideKernel, SixtyFourRanks) {
  contract::TestCase c = case_of(5, 64);
  c.config.max_tokens = 4;
  CallRanks ranks(c);
  ranks.run_step(0, {.generic = true});
}

}  // namespace
}  // namespace ferry::cuda
