// The kernels of dispatch and combine, run on the host: whole calls of all ranks, blocks in any order,
// against the oracle.
#include <gtest/gtest.h>

#include "kernels_on_host/call_ranks.hpp"

namespace ferry::cuda {
namespace {

contract::TestCase case_of(std::uint64_t number, int ranks, Transfer transfer) {
  contract::TestCase c = call_case(number, ranks);
  c.config.experts = 6;
  c.config.top_k = 2;
  c.config.max_tokens = 9;
  c.config.hidden = 80;
  c.config.transfer = transfer;
  return c;
}

class KernelCalls : public testing::TestWithParam<Transfer> {};

TEST_P(KernelCalls, InEveryForm) {
  for (const int size : {1, 2, 3}) {
    const contract::TestCase c = case_of(1, size, GetParam());
    CallRanks ranks(c);
    ranks.run_step(0, {.few_tokens = true});
    ranks.run_step(1, {.generic = true});
    ranks.run_step(2, {.split_phases = true});
    ranks.run_step(6, {.split_phases = true, .keeps_inputs = true});
    ranks.run_step(3, {.few_tokens = true, .count_on_device = true});
    ranks.run_step(4, {.count_on_device = true});
    // Uses the plan of the last step.
    const contract::StepInputs step = contract::make_inputs(c, 4),
                               other = contract::with_new_values(c, step, 5);
    ranks.dispatch(other, {.by_plan = true});
    ranks.dispatch(other, {.by_plan = true, .split_phases = true});
    ranks.dispatch(other, {.by_plan = true, .split_phases = true, .keeps_inputs = true});
    ranks.combine(other, contract::make_expert_outputs(c, other), {});
  }
}

// Few tokens, whose sums travel in packets, and many; results of all types.
TEST_P(KernelCalls, IntoTheirResidual) {
  std::uint64_t number = 70;
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    for (const int tokens : {9, 70}) {
      contract::TestCase c = case_of(++number, 3, GetParam());
      c.config.max_tokens = tokens;
      c.config.combine_type = c.outputs = type == DType::fp16 ? DType::fp32 : type;
      c.result = type;
      CallRanks ranks(c);
      ranks.run_step(0, {.few_tokens = true, .adds_to_result = true});
      ranks.run_step(1, {.split_phases = true, .adds_to_result = true});
      if (GetParam() == Transfer::gather) continue;
      c.config.reduction = c.reduction = Reduction::exact;
      CallRanks exact(c);
      exact.run_step(0, {.adds_to_result = true});
      exact.run_step(1, {.split_phases = true, .keeps_inputs = true, .adds_to_result = true});
    }
  }
}

TEST_P(KernelCalls, WithManyTokensForTheWarps) {
  contract::TestCase c = case_of(2, 2, GetParam());
  c.config.max_tokens = 70;
  c.config.hidden = 16;
  c.full = true;
  CallRanks ranks(c);
  ranks.run_step(0, {.few_tokens = true});
  ranks.run_step(1, {});
}

TEST_P(KernelCalls, WithRowsThatSendersStoreAtTheirPosition) {
  contract::TestCase c = case_of(10, 2, GetParam());
  c.config.max_tokens = static_cast<std::int32_t>(kManyTokens) + 4;
  c.config.hidden = 16;
  c.config.capacity = 500;
  c.full = true;
  CallRanks ranks(c);
  ranks.run_step(0, {.direct_write = true});
  const contract::StepInputs step = contract::make_inputs(c, 0),
                             other = contract::with_new_values(c, step, 1);
  ranks.dispatch(other, {.by_plan = true, .direct_write = true});
}

TEST_P(KernelCalls, InOtherFormatsAndTypes) {
  contract::TestCase c = case_of(3, 2, GetParam());
  c.config.format = Format::fp8_e4m3();
  c.config.hidden = 256;
  c.config.layout = Layout::expert_padded;
  c.result = DType::fp32;
  c.weights_from = contract::WeightsFrom::topk_weights;
  CallRanks ranks(c);
  ranks.run_step(0, {.few_tokens = true});
  ranks.run_step(1, {});
}

// Whole rows and, of few tokens, halves and quarters; rows of one piece of a stream, of two and of more.
TEST_P(KernelCalls, InMicroscaledFormats) {
  std::uint64_t number = 30;
  for (const char* format : {"mxfp8", "mxfp4-ocp", "nvfp4", "nvfp4-token"}) {
    const bool nvfp4 = std::string(format).starts_with("nvfp4");
    for (const auto& [hidden, tokens, type] : {std::tuple{2080, 9, DType::bf16},
                                               {2080, 1, DType::bf16},
                                               {2080, 3, DType::fp16},
                                               {544, 3, DType::fp32},
                                               {7168, 3, DType::bf16},
                                               {7200, 2, DType::fp16}}) {
      if (hidden > 7000 && !nvfp4) continue;
      contract::TestCase c = case_of(++number, 2, GetParam());
      c.config.format = parse_format(format);
      c.config.hidden = hidden;
      c.config.max_tokens = tokens;
      c.config.layout = Layout::expert_padded;
      c.type = type;
      c.global_scale = 0.37f;
      c.full = tokens < 9;
      SCOPED_TRACE(std::string(format) + ", H = " + std::to_string(hidden) + ", " + to_string(type));
      CallRanks ranks(c);
      const auto dispatch = [&](int index, const CallForm& form) {
        ranks.dispatch(contract::make_inputs(c, index), form);
      };
      dispatch(0, {.few_tokens = true});
      dispatch(1, {});
      if (tokens < 9 || HasFailure()) continue;
      dispatch(2, {.few_tokens = true, .count_on_device = true});
      dispatch(3, {.generic = true});
      dispatch(4, {.split_phases = true});
      const contract::StepInputs step = contract::make_inputs(c, 4);
      ranks.dispatch(contract::with_new_values(c, step, 5), {.by_plan = true});
    }
  }
}

// Columns of all groups, and of each group of expert_padded, whose rows are no multiple of four.
TEST_P(KernelCalls, WithScalesInColumns) {
  std::uint64_t number = 50;
  for (const char* format :
       {"fp8-columns", "fp8-columns-pow2-packed", "mxfp8-columns", "nvfp4-columns", "nvfp4-token-columns"}) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
      contract::TestCase c = case_of(++number, 3, GetParam());
      c.config.format = parse_format(format);
      c.config.hidden = 672;
      c.config.layout = layout;
      c.config.alignment = 2;
      if (layout == Layout::expert_padded) c.config.capacity = 10;  // some routes may be dropped
      c.config.zero_padding = true;
      SCOPED_TRACE(std::string(format) + (layout == Layout::expert_padded ? ", padded" : ""));
      CallRanks ranks(c);
      const auto dispatch = [&](int index, const CallForm& form) {
        ranks.dispatch(contract::make_inputs(c, index), form);
      };
      dispatch(0, {.few_tokens = true});
      dispatch(1, {});
      dispatch(2, {.generic = true});
      dispatch(3, {.split_phases = true});
      const contract::StepInputs step = contract::make_inputs(c, 3);
      ranks.dispatch(contract::with_new_values(c, step, 4), {.by_plan = true});
    }
  }
}

TEST_P(KernelCalls, WithValuesBesideTheRows) {
  contract::TestCase c = case_of(4, 3, GetParam());
  c.row_values = true;
  CallRanks ranks(c);
  ranks.run_step(0, {.few_tokens = true});
  ranks.run_step(1, {.split_phases = true});
  ranks.run_step(2, {.split_phases = true, .keeps_inputs = true});
}

TEST_P(KernelCalls, WithSharedExperts) {
  contract::TestCase c = case_of(5, 3, GetParam());
  c.config.shared_experts = 3;
  c.config.max_tokens = 20;  // of more than 16 sums travel in staging
  c.full = true;
  c.outputs = c.result = c.config.combine_type = DType::fp32;  // shows the order of addition
  CallRanks ranks(c);
  ranks.run_step(0, {.few_tokens = true});
  ranks.run_step(1, {.generic = true});
  if (GetParam() == Transfer::gather) return;
  c.config.reduction = c.reduction = Reduction::exact;
  CallRanks exact(c);
  exact.run_step(2, {});
}

// Rank 1 has no expert, the others fewer than their slots.
TEST_P(KernelCalls, WithEmptySlots) {
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
    for (const int shared : {0, 1}) {
      const bool rank_major = layout == Layout::rank_major;
      if (rank_major && (shared > 0 || GetParam() == Transfer::gather)) continue;
      SCOPED_TRACE(std::string(to_string(layout)) + ", shared experts: " + std::to_string(shared));
      contract::TestCase c = case_of(7, 3, GetParam());
      c.config.layout = layout;
      c.config.alignment = rank_major ? 1 : 4;
      if (rank_major) c.weights_from = contract::WeightsFrom::none;
      c.config.experts = 5;
      c.config.placement = Placement::table({{0, 1}, {2, 0}, {0, 0}, {2, 1}, {0, 2}}, 3);
      c.config.local_slots = 6;
      c.config.shared_experts = shared;
      c.config.zero_padding = shared == 0;
      CallRanks ranks(c);
      ranks.run_step(0, {.few_tokens = true});
      ranks.run_step(1, {});
      ranks.run_step(2, {.split_phases = true, .generic = true});
    }
  }
}

TEST_P(KernelCalls, WithDroppedRows) {
  contract::TestCase c = case_of(6, 3, GetParam());
  c.config.capacity = 4;
  CallRanks ranks(c);
  ranks.run_step(0, {.few_tokens = true});
  ranks.run_step(1, {});
  ranks.run_step(2, {.split_phases = true, .keeps_inputs = true});
}

// As the backend collective runs a fused call: this rank's own rows are read where the caller has them.
TEST_P(KernelCalls, InPhasesThatReadTheCallersRows) {
  const auto run = [&](Layout layout, Reduction reduction) {
    SCOPED_TRACE(std::string(to_string(layout)) + ", " + to_string(reduction));
    contract::TestCase c = case_of(30, 3, GetParam());
    c.config.layout = layout;
    c.config.alignment = layout == Layout::rank_major ? 1 : 2;
    c.config.reduction = c.reduction = reduction;
    if (layout == Layout::rank_major) c.weights_from = contract::WeightsFrom::none;
    CallRanks ranks(c);
    ranks.run_step(0, {.split_phases = true, .keeps_inputs = true});
    ranks.run_step(1, {.split_phases = true});
    ranks.run_step(2, {.split_phases = true, .keeps_inputs = true});
  };
  run(Layout::expert_major, Reduction::partial);
  if (GetParam() == Transfer::routed) {
    run(Layout::rank_major, Reduction::partial);
    run(Layout::expert_padded, Reduction::exact);
    run(Layout::expert_major, Reduction::unreduced);
  }
  contract::TestCase c = case_of(31, 3, GetParam());
  c.weights_from = contract::WeightsFrom::topk_weights;
  CallRanks ranks(c);
  ranks.run_step(0, {.split_phases = true});
  ranks.run_step(0, {.generic = true});
  ranks.run_step(0, {.split_phases = true, .keeps_inputs = true});
}

TEST_P(KernelCalls, IntoTooLittleMemory) {
  for (const Layout layout : {Layout::expert_major, Layout::rank_major}) {
    for (const std::int64_t capacity : {0, 12}) {
      if (GetParam() == Transfer::gather && layout == Layout::rank_major) continue;
      contract::TestCase c = case_of(32, 3, GetParam());
      c.config.layout = layout;
      c.config.alignment = layout == Layout::rank_major ? 1 : 2;
      c.config.capacity = capacity;
      CallRanks ranks(c);
      int index = 0;
      for (const CallForm& form : {CallForm{.few_tokens = true}, CallForm{.generic = true},
                                   CallForm{.split_phases = true}, CallForm{.count_on_device = true}})
        ranks.dispatch_past_row_limits(index++, form);
      // A limit holds for its call alone.
      const contract::StepInputs step = contract::make_inputs(c, 5);
      ranks.dispatch(step, {.few_tokens = true});
      ranks.dispatch(contract::with_new_values(c, step, 6), {.by_plan = true});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Routed, KernelCalls, testing::Values(Transfer::routed));
INSTANTIATE_TEST_SUITE_P(Gathered, KernelCalls, testing::Values(Transfer::gather));

// More ranks than slots: a token has more destinations than its tile has slots.
TEST(GatheredCalls, OfMoreRanksThanSlots) {
  for (const int size : {5, 9}) {
    contract::TestCase c = case_of(7, size, Transfer::gather);
    c.config.experts = 10;
    c.config.max_tokens = 3;
    CallRanks ranks(c);
    ranks.run_step(0, {.few_tokens = true});
    ranks.run_step(1, {});
    for (int r = 0; r < size; ++r) {
      for (std::int64_t token = 0; token < ranks.plan(r).header->tokens; ++token) {
        for (int to = 0; to < size; ++to) {
          EXPECT_EQ(ranks.plan(r).token_ranks[token * size + to], to);
          EXPECT_EQ(ranks.plan(r).sent_tokens[to * c.config.max_tokens + token], token);
        }
      }
    }
  }
}

// Ranks that no token has chosen return +0, whatever is combined, though they pass no memory.
TEST(GatheredCalls, OfRanksWithoutRows) {
  contract::TestCase c = case_of(8, 3, Transfer::gather);
  c.tokens = {4, 0, 0};
  const std::vector<std::vector<std::int64_t>> ids{{0, 1, -1, -1, 1, -1, 0, 0}, {}, {}};
  for (const bool values : {false, true}) {
    c.row_values = values;
    for (const CallForm& form : {CallForm{.few_tokens = true, .no_memory_without_rows = true},
                                 CallForm{.split_phases = true, .no_memory_without_rows = true}}) {
      CallRanks ranks(c);
      const contract::StepInputs step = contract::inputs_from_ids(c, ids, 0);
      ranks.dispatch(step, form);
      ranks.combine(step, contract::make_expert_outputs(c, step), form);
      EXPECT_EQ(ranks.plan(2).header->total, 0);
      EXPECT_EQ(ranks.state(2).wire.combine_messages, 4);
    }
  }
}

TEST(GatheredCalls, SendEveryTokenToEveryRank) {
  contract::TestCase c = case_of(9, 4, Transfer::gather);
  c.tokens = {3, 0, 5, 1};
  CallRanks ranks(c);
  ranks.run_step(0, {.few_tokens = true});
  for (int r = 0; r < 4; ++r) {
    const DeviceWireCounts& wire = ranks.state(r).wire;
    const int mine = c.tokens[static_cast<std::size_t>(r)];
    EXPECT_EQ(wire.dispatch_messages, 3 * mine);
    EXPECT_EQ(wire.combine_messages, 9 - mine);
    EXPECT_EQ(wire.combine_bytes, (9 - mine) * std::int64_t{80 * 2});
  }
}

// The host counts a gather as one call, however many rounds it took.
TEST_P(KernelCalls, AfterGathersInRounds) {
  const contract::TestCase c = case_of(11, 2, GetParam());
  CallRanks ranks(c);
  ranks.run_step(0, {.few_tokens = true});
  ranks.gather_in_rounds(3);
  ranks.run_step(1, {});
  ranks.gather_in_rounds(1);
  ranks.gather_in_rounds(2);
  ranks.run_step(2, {.few_tokens = true});
  ranks.run_step(3, {.split_phases = true});
}

// --- an engine ---------------------------------------------------------------------------------------------

class CarriedCalls : public testing::TestWithParam<Transfer> {
 protected:
  static contract::TestCase carried_case(std::uint64_t number, int ranks) {
    contract::TestCase c = case_of(number, ranks, GetParam());
    c.config.backend = BackendKind::collective;
    c.config.memory = MemoryKind::device;
    return c;
  }
};

TEST_P(CarriedCalls, FromIdsAndByPlan) {
  for (const int size : {2, 3, 5}) {
    const contract::TestCase c = carried_case(12, size);
    CallRanks ranks(c);
    ranks.run_step(0, {.split_phases = true});
    ranks.run_step(3, {.split_phases = true, .keeps_inputs = true});
    ranks.run_step(1, {.split_phases = true, .count_on_device = true});
    const contract::StepInputs step = contract::make_inputs(c, 1),
                               other = contract::with_new_values(c, step, 2);
    ranks.dispatch(other, {.by_plan = true, .split_phases = true});
    ranks.combine(other, contract::make_expert_outputs(c, other), {.split_phases = true});
  }
}

TEST_P(CarriedCalls, InOtherFormatsAndTypes) {
  contract::TestCase c = carried_case(13, 3);
  c.config.format = Format::fp8_e4m3();
  c.config.hidden = 256;
  c.config.layout = Layout::expert_padded;
  c.config.capacity = 6;  // some routes are dropped
  c.result = DType::fp32;
  c.row_values = true;
  CallRanks ranks(c);
  ranks.run_step(0, {.split_phases = true});
  ranks.run_step(1, {.split_phases = true});
}

// Ranks that no token has chosen; where tokens go to every rank, they return +0.
TEST_P(CarriedCalls, OfRanksWithoutRows) {
  contract::TestCase c = carried_case(14, 3);
  c.tokens = {4, 0, 0};
  const std::vector<std::vector<std::int64_t>> ids{{0, 1, -1, -1, 1, -1, 0, 0}, {}, {}};
  const contract::StepInputs step = contract::inputs_from_ids(c, ids, 0);
  for (const bool keeps : {false, true}) {
    const CallForm form{.split_phases = true, .keeps_inputs = keeps, .no_memory_without_rows = true};
    CallRanks ranks(c);
    ranks.dispatch(step, form);
    ranks.combine(step, contract::make_expert_outputs(c, step), form);
  }
}

TEST_P(CarriedCalls, IntoTooLittleMemory) {
  CallRanks ranks(carried_case(15, 3));
  for (int index = 0; index < 3; ++index) ranks.dispatch_past_row_limits(index, {.split_phases = true});
}

INSTANTIATE_TEST_SUITE_P(Routed, CarriedCalls, testing::Values(Transfer::routed));
INSTANTIATE_TEST_SUITE_P(Gathered, CarriedCalls, testing::Values(Transfer::gather));

// --- two hops ----------------------------------------------------------------------------------------------

const std::vector<std::vector<int>> kNodes = {{0, 0, 1, 1}, {0, 1, 0, 0}, {0, 1, 1, 2, 2, 2, 2, 2}};

// skip_a2a in one hop: the weights of the slots are this rank's own.
TEST(KernelCallsBySource, ReplicatedTokensAreWeighted) {
  for (const int shared : {0, 2}) {
    contract::TestCase c = case_of(90 + static_cast<std::uint64_t>(shared), 3, Transfer::routed);
    c.tokens = {9, 9, 9};
    c.config.input = Input::replicated;
    c.config.repeats = true;
    c.config.shared_experts = shared;
    c.config.shared_split = shared;
    c.weights_from = contract::WeightsFrom::topk_weights;
    CallRanks ranks(c);
    for (int index = 0; index < 2; ++index) {
      const contract::StepInputs step = contract::make_inputs(c, index);
      ranks.dispatch(step, {});
      ranks.plan_by_source(step);
      ranks.combine(step, contract::make_expert_outputs(c, step), {});
    }
  }
}

class KernelHops : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  contract::TestCase hop_case(ReductionLevel level) const {
    const auto [nodes, window] = GetParam();
    const std::vector<int>& labels = kNodes[static_cast<std::size_t>(nodes)];
    contract::TestCase c =
        case_of(20 + static_cast<std::uint64_t>(nodes), static_cast<int>(labels.size()), Transfer::routed);
    c.nodes = labels;
    c.config.experts = 2 * c.ranks;
    c.config.top_k = 4;
    c.config.window = window;
    c.config.reduction_level = level;
    return c;
  }
};

TEST_P(KernelHops, DispatchAndCombineByRank) {
  const contract::TestCase c = hop_case(ReductionLevel::rank);
  CallRanks ranks(c);
  ranks.run_step(0, {.split_phases = true});
  const contract::StepInputs step = contract::make_inputs(c, 0),
                             other = contract::with_new_values(c, step, 1);
  ranks.dispatch(other, {.by_plan = true, .split_phases = true});
  ranks.combine(other, contract::make_expert_outputs(c, other), {.split_phases = true});
}

// MAX's calls: the plan of the combine is made from src_info, row_offsets and counts.
TEST_P(KernelHops, CombineBySource) {
  for (const Reduction reduction : {Reduction::exact, Reduction::partial}) {
    contract::TestCase c = hop_case(ReductionLevel::rank);
    c.config.reduction = c.reduction = reduction;
    c.config.repeats = true;
    c.duplicates = reduction == Reduction::exact;
    c.weights_from =
        reduction == Reduction::exact ? contract::WeightsFrom::topk_weights : contract::WeightsFrom::none;
    c.config.shared_experts = 1;
    if (reduction == Reduction::partial) c.config.input = Input::replicated;  // skip_a2a
    CallRanks ranks(c);
    for (const bool keeps : {false, true}) {
      const contract::StepInputs step = contract::make_inputs(c, keeps ? 1 : 0);
      const CallForm form{.split_phases = true, .keeps_inputs = keeps};
      ranks.dispatch(step, form);
      ranks.plan_by_source(step);
      ranks.combine(step, contract::make_expert_outputs(c, step), form);
    }
  }
}

// As Lane::dispatch() and Lane::combine() run them over a HopCarrier.
TEST_P(KernelHops, FusedCallsReadTheCallersRows) {
  const CallForm keeps{.split_phases = true, .keeps_inputs = true};
  const contract::TestCase by_rank = hop_case(ReductionLevel::rank), by_node = hop_case(ReductionLevel::node);
  CallRanks ranks(by_rank);
  ranks.run_step(0, keeps);
  const contract::StepInputs step = contract::make_inputs(by_rank, 0),
                             other = contract::with_new_values(by_rank, step, 1);
  CallForm by_plan = keeps;
  by_plan.by_plan = true;
  ranks.dispatch(other, by_plan);
  ranks.combine(other, contract::make_expert_outputs(by_rank, other), by_plan);
  CallRanks adding(by_node);
  const contract::StepInputs added = contract::make_inputs(by_node, 2);
  adding.dispatch(added, keeps);
  adding.combine(added, contract::make_expert_outputs(by_node, added), {.split_phases = true});
}

TEST_P(KernelHops, RelaysAddByNode) {
  contract::TestCase c = hop_case(ReductionLevel::node);
  c.row_values = true;
  c.result = DType::fp32;
  CallRanks ranks(c);
  ranks.run_step(0, {.split_phases = true});
  ranks.run_step(1, {.split_phases = true});
}

TEST_P(KernelHops, EveryRowReturns) {
  contract::TestCase c = hop_case(ReductionLevel::node);
  c.config.format = Format::fp8_e4m3();
  c.config.hidden = 256;
  c.config.reduction = c.reduction = Reduction::exact;
  c.config.capacity = 16;  // some routes are dropped
  CallRanks ranks(c);
  ranks.run_step(0, {.split_phases = true});
}

TEST_P(KernelHops, IntoTooLittleMemory) {
  CallRanks ranks(hop_case(ReductionLevel::rank));
  for (int index = 0; index < 3; ++index) ranks.dispatch_past_row_limits(index, {.split_phases = true});
}

INSTANTIATE_TEST_SUITE_P(Nodes, KernelHops,
                         testing::Combine(testing::Range(0, static_cast<int>(kNodes.size())),
                                          testing::Values(1, 7)));

}  // namespace
}  // namespace ferry::cuda
