// The reduction level of combine, on simulated nodes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "harness/device.hpp"
#include "harness/harness.hpp"
#include "oracle/combine.hpp"

namespace ferry::contract {
namespace {

// The node of each rank: 2 x 2, 3 + 1, 2 x 4 and 1 + 2 + 5, the uneven ones with ranks that are not
// consecutive.
const std::vector<int> kNodes[] = {
    {0, 0, 1, 1}, {0, 1, 0, 0}, {0, 0, 0, 0, 1, 1, 1, 1}, {0, 1, 2, 0, 2, 2, 1, 2}};

// Most tokens have experts on several ranks of several nodes.
TestCase nodes_case(TestCase c, const std::vector<int>& nodes, ReductionLevel level) {
  c.nodes = nodes;
  c.ranks = static_cast<int>(nodes.size());
  c.config.experts = 2 * c.ranks;
  c.config.top_k = 6;
  c.config.max_tokens = 6;
  c.config.hidden = 80;
  c.config.reduction_level = level;
  c.masked = 0.2;
  return c;
}

// The cases tell the levels apart: their results have different bits.
void require_different_sums(TestCase c) {
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  const auto sums = [&](ReductionLevel level) {
    c.config.reduction_level = level;
    return oracle::combined(c.config, step.positions, outputs, Topology(c.nodes), 0);
  };
  EXPECT_NE(sums(ReductionLevel::rank), sums(ReductionLevel::node));
}

// Why 64 ranks cannot run; empty: they can.
std::string no_sixty_four(const Setup& setup) {
  if (setup.rank_kind != RankKind::threads || !simulates_nodes(setup))
    return "threads with simulated nodes only";
  // Kernels of ranks that share a GPU must run at once, and it takes work from 32 queues.
  return setup.on_device() && device::count() < 2 ? "needs two GPUs" : "";
}

TestCase sixty_four(const TestCase& c, ReductionLevel level) {
  std::vector<int> nodes;
  for (int rank = 0; rank < 64; ++rank) nodes.push_back(rank / 8);
  return nodes_case(c, nodes, level);
}

// More ranks than a warp has threads: kernels of their own.
TEST_P(Contract, SixtyFourRanksInEightNodes) {
  if (const std::string why = no_sixty_four(GetParam()); !why.empty()) GTEST_SKIP() << why;
  TestCase c = sixty_four(small_case(64), ReductionLevel::rank);
  c.config.hops = Hops::one;
  add(c);
  c.split_phases = true;
  c.row_values = true;
  add(c);
  c.split_phases = false;
  c.config.layout = Layout::rank_major;
  c.row_values = false;
  c.weights_from = WeightsFrom::none;
  add(c);
  c.config.layout = Layout::expert_padded;
  c.config.format = Format::fp8_e4m3();
  c.config.hidden = 128;
  c.config.reduction = c.reduction = Reduction::exact;
  c.weights_from = WeightsFrom::row_weights;
  add(c);
  run_added();
}

TEST_P(Contract, SixtyFourRanksInEightNodesInTwoHops) {
  if (const std::string why = no_sixty_four(GetParam()); !why.empty()) GTEST_SKIP() << why;
  if (GetParam().hops != Hops::two) GTEST_SKIP() << "has one hop";
  TestCase c = sixty_four(small_case(65), ReductionLevel::node);
  add(c);
  c.split_phases = true;
  c.row_values = true;
  c.weights_from = WeightsFrom::row_weights;
  c.config.format = Format::fp8_e4m3();
  c.config.hidden = 128;
  c.config.reduction_level = ReductionLevel::rank;
  add(c);
  run_added();
}

TEST_P(Contract, PartialSumsByRankAndByNode) {
  if (!takes_nodes(GetParam())) GTEST_SKIP() << "has no simulated nodes";
  for (const std::vector<int>& nodes : kNodes) {
    for (const ReductionLevel level : {ReductionLevel::rank, ReductionLevel::node}) {
      TestCase c = nodes_case(small_case(nodes.size()), nodes, level);
      c.tokens.assign(nodes.size(), c.config.max_tokens);
      c.result = DType::fp32;
      require_different_sums(c);
      add(c);
      c.tokens.clear();
      c.split_phases = true;
      c.row_values = true;
      c.result = c.outputs = c.config.combine_type = DType::fp16;
      add(c);
      c.split_phases = false;
      c.weights_from = WeightsFrom::topk_weights;
      c.result = DType::bf16;
      c.outputs = c.config.combine_type = DType::fp32;
      c.any_bits = true;
      add(c);
      c.config.capacity = 8;  // ranks and nodes whose rows were all dropped
      add(c);
      c.weights_from = WeightsFrom::none;
      c.config.layout = Layout::rank_major;
      c.row_values = false;
      c.config.combine_type = DType::bf16;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, ExactAndUnreducedIgnoreTheLevel) {
  if (!takes_nodes(GetParam())) GTEST_SKIP() << "has no simulated nodes";
  for (const Reduction reduction : {Reduction::exact, Reduction::unreduced}) {
    TestCase c = nodes_case(small_case(1), {0, 1, 0, 0}, ReductionLevel::node);
    c.reduction = c.config.reduction = reduction;
    if (reduction == Reduction::unreduced) c.weights_from = WeightsFrom::none;
    c.result = DType::fp32;
    add(c);
  }
  run_added();
}

// Setups in two hops have one window of their own; here are the others.
TEST_P(Contract, AnyWindowOnAnyNodes) {
  if (!takes_nodes(GetParam())) GTEST_SKIP() << "has no simulated nodes";
  for (const std::vector<int>& nodes : kNodes) {
    for (const int window : {1, 64}) {
      TestCase c = nodes_case(small_case(nodes.size()), nodes, ReductionLevel::node);
      c.config.window = window;
      c.row_values = true;
      add(c);
      c.split_phases = true;
      c.reduction = c.config.reduction = Reduction::exact;
      add(c);
    }
  }
  run_added();
}

// With a level of node on one node, the sums of all ranks are rounded once more before the result.
TEST_P(Contract, OneNodeMayAddByNode) {
  if (!simulates_nodes(GetParam())) GTEST_SKIP() << "has no simulated nodes";
  if (GetParam().backend == BackendKind::cuda) GTEST_SKIP() << "has no level node in one hop";
  TestCase c = nodes_case(small_case(1), {0, 0, 0}, ReductionLevel::node);
  c.result = DType::fp32;
  add(c);
  run_added();
}

}  // namespace
}  // namespace ferry::contract
