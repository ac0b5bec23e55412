// The oracle's row positions, metadata and sums against a case worked out by hand.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "oracle/combine.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/expected.hpp"
#include "oracle/indexed_rows.hpp"
#include "oracle/numbers.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::oracle {
namespace {

constexpr int kHidden = 8;

// Two ranks; experts 0 and 1 on rank 0, expert 2 on rank 1.
//   rank 0   token 0: 2 0     token 1: 1 -
//   rank 1   token 0: 0 0     token 1: 2 1     token 2: - 7 (no such expert)
GlobalInputs tiny(Layout layout, int alignment, std::int64_t capacity = 0) {
  GlobalInputs inputs;
  inputs.config = {.experts = 3, .top_k = 2, .hidden = kHidden, .max_tokens = 3};
  inputs.config.placement = Placement::table({{0, 0}, {0, 1}, {1, 0}}, 2);
  inputs.config.layout = layout;
  inputs.config.alignment = alignment;
  inputs.config.capacity = capacity;
  inputs.type = DType::fp32;
  inputs.format = Format::fp32();
  inputs.weighted = true;
  inputs.ranks.resize(2);
  inputs.ranks[0].tokens = 2;
  inputs.ranks[0].ids = {2, 0, 1, -1};
  inputs.ranks[0].weights = {1.0f, 0.5f, 2.0f, 9.0f};
  inputs.ranks[1].tokens = 3;
  inputs.ranks[1].ids = {0, 0, 2, 1, -1, 7};
  inputs.ranks[1].weights = {0.25f, 4.0f, 8.0f, 16.0f, 9.0f, 9.0f};
  float next = 1;  // token t of rank r is 1 + 2r + t in every column
  for (RankInputs& rank : inputs.ranks) {
    for (std::int64_t t = 0; t < rank.tokens; ++t, next += 1) {
      const std::vector<float> row(kHidden, next);
      const auto* bytes = reinterpret_cast<const std::byte*>(row.data());
      rank.parts[0].insert(rank.parts[0].end(), bytes, bytes + kHidden * sizeof(float));
    }
  }
  return inputs;
}

using Ints = std::vector<std::int32_t>;
const Source kPadding{};

TEST(OracleRowPositions, ExpertMajorAlignsEveryExpert) {
  const RowPositions positions = find_row_positions(tiny(Layout::expert_major, 4));
  EXPECT_EQ(positions.ranks[0].capacity, 16);  // 2*3*2 + 2*3 = 18, down to a multiple of 4
  EXPECT_EQ(positions.ranks[1].capacity, 8);   // 2*3*1 + 3 = 9
  EXPECT_EQ(positions.ranks[0].counts, (Ints{3, 2}));
  EXPECT_EQ(positions.ranks[0].row_offsets, (Ints{0, 4, 8}));
  EXPECT_EQ(positions.ranks[0].group_expert, (Ints{0, 1}));
  EXPECT_EQ(positions.ranks[1].counts, (Ints{2}));
  EXPECT_EQ(positions.ranks[1].row_offsets, (Ints{0, 4}));
  EXPECT_EQ(positions.counts, (Ints{1, 1, 1, 2, 1, 1}));
  EXPECT_EQ(positions.tokens_between, (Ints{2, 1, 2, 1}));
  EXPECT_EQ(positions.overflow.rank, -1);

  const RowMetadata metadata = row_metadata(tiny(Layout::expert_major, 4), positions, 0);
  const std::vector<Source> source{{0, 0, 1}, {1, 0, 0}, {1, 0, 1}, kPadding,
                                   {0, 1, 0}, {1, 1, 1}, kPadding,  kPadding};
  EXPECT_EQ(metadata.source, source);
  EXPECT_EQ(metadata.weight, (std::vector<float>{0.5f, 0.25f, 4.0f, 0, 2.0f, 16.0f, 0, 0}));
  EXPECT_EQ(metadata.group_of_row, (Ints{0, 0, 0, -1, 1, 1, -1, -1}));
}

TEST(OracleRowPositions, IndexedRowsHoldEachTokenOnce) {
  GlobalInputs inputs = tiny(Layout::expert_indexed, 4);
  const RowPositions positions = find_row_positions(inputs);
  EXPECT_EQ(positions.ranks[0].row_offsets, (Ints{0, 4, 8}));
  const IndexedRows rows = indexed_rows(inputs, positions, 0);
  EXPECT_EQ(rows.capacity, 6);
  EXPECT_EQ(rows.source, (std::vector<Source>{{0, 0, -1}, {0, 1, -1}, {1, 0, -1}, {1, 1, -1}}));
  EXPECT_EQ(rows.source_offsets, (Ints{0, 2, 4}));
  EXPECT_EQ(rows.index, (Ints{0, 2, 2, 6, 1, 3, 6, 6}));
  EXPECT_EQ(rows.slot, (Ints{1, 0, 1, -1, 0, 1, -1, -1}));
  EXPECT_EQ(rows.block_group, (Ints{0, 1, -1, -1}));

  inputs.config.shared_experts = 1;  // every token of a rank has a row there
  const IndexedRows with_shared = indexed_rows(inputs, find_row_positions(inputs), 1);
  EXPECT_EQ(with_shared.source, (std::vector<Source>{{0, 0, -1}, {1, 0, -1}, {1, 1, -1}, {1, 2, -1}}));
  EXPECT_EQ(with_shared.index, (Ints{1, 2, 3, 6, 0, 2, 6, 6}));
  EXPECT_EQ(with_shared.slot, (Ints{2, 2, 2, -1, 0, 0, -1, -1}));
}

TEST(OracleRowPositions, MaskedAndBadSlotsHaveNoRow) {
  const RowPositions positions = find_row_positions(tiny(Layout::expert_major, 1));
  EXPECT_EQ(positions.route(0, 1, 1).destination, -1);
  EXPECT_EQ(positions.route(1, 2, 1).row, -1);
  EXPECT_EQ(positions.bad_ids[0].count, 0);
  EXPECT_EQ(positions.bad_ids[1].count, 1);
  EXPECT_EQ(positions.bad_ids[1].token, 2);
  EXPECT_EQ(positions.bad_ids[1].slot, 1);
  EXPECT_EQ(positions.bad_ids[1].id, 7);
}

TEST(OracleRowPositions, RowsPastTheCapacityAreDropped) {
  const RowPositions positions = find_row_positions(tiny(Layout::expert_major, 4, 4));
  EXPECT_EQ(positions.ranks[0].counts, (Ints{3, 0}));
  EXPECT_EQ(positions.ranks[0].row_offsets, (Ints{0, 4, 4}));
  EXPECT_EQ(positions.route(0, 1, 0).destination, 0);
  EXPECT_EQ(positions.route(0, 1, 0).row, -1);
  EXPECT_EQ(positions.overflow.rank, 0);
  EXPECT_EQ(positions.overflow.capacity, 4);
  EXPECT_EQ(positions.overflow.needed, 8);
  EXPECT_EQ(positions.overflow.dropped, 2);
}

TEST(OracleRowPositions, ExpertPaddedGivesEveryExpertItsOwnSegment) {
  const RowPositions positions = find_row_positions(tiny(Layout::expert_padded, 2, 4));
  EXPECT_EQ(positions.ranks[0].row_offsets, (Ints{0, 4, 8}));
  EXPECT_EQ(positions.ranks[0].counts, (Ints{3, 2}));
  std::vector<RowState> states;
  for (const RowInfo& row : positions.ranks[0].rows) states.push_back(row.state);
  const auto kept = RowState::kept, padding = RowState::padding, untouched = RowState::untouched;
  EXPECT_EQ(states, (std::vector<RowState>{kept, kept, kept, padding, kept, kept, untouched, untouched}));

  const RowPositions tight = find_row_positions(tiny(Layout::expert_padded, 2, 2));
  EXPECT_EQ(tight.ranks[0].counts, (Ints{2, 2}));
  EXPECT_EQ(tight.route(1, 0, 1).row, -1);  // the third row of expert 0
  EXPECT_EQ(tight.overflow.needed, 4);      // 3 rows, aligned
  EXPECT_EQ(tight.overflow.dropped, 1);
}

TEST(OracleRowPositions, SharedExpertsComeFirst) {
  GlobalInputs inputs = tiny(Layout::expert_major, 2);
  inputs.config.shared_experts = 2;
  const RowPositions positions = find_row_positions(inputs);
  EXPECT_EQ(positions.ranks[0].capacity, 22);  // 2*3*2 + 2*1, and 2*4 for the shared rows
  EXPECT_EQ(positions.ranks[0].counts, (Ints{2, 2, 3, 2}));
  EXPECT_EQ(positions.ranks[0].row_offsets, (Ints{0, 2, 4, 8, 10}));
  EXPECT_EQ(positions.ranks[0].group_expert, (Ints{3, 4, 0, 1}));
  EXPECT_EQ(positions.ranks[1].counts, (Ints{3, 3, 2}));
  EXPECT_EQ(positions.ranks[1].row_offsets, (Ints{0, 4, 8, 10}));
  EXPECT_EQ(positions.route(1, 0, 0).row, 5);
  EXPECT_EQ(positions.route(0, 0, 0).row, 8);  // on rank 1, which has three tokens
  EXPECT_EQ(positions.counts, (Ints{1, 1, 1, 2, 1, 1}));
  const std::vector<std::vector<std::int64_t>> shared{{0, 1, 2}, {4, 5, 6}};
  EXPECT_EQ(positions.shared_rows[1], shared);
  const RowMetadata metadata = row_metadata(inputs, positions, 1);
  const std::vector<Source> source{{1, 0, 2}, {1, 1, 2}, {1, 2, 2}, kPadding,  {1, 0, 3},
                                   {1, 1, 3}, {1, 2, 3}, kPadding,  {0, 0, 0}, {1, 1, 0}};
  EXPECT_EQ(metadata.source, source);
  EXPECT_EQ(metadata.weight, (std::vector<float>{1, 1, 1, 0, 1, 1, 1, 0, 1.0f, 8.0f}));
}

TEST(OracleRowPositions, RankMajorHasOneRowForEachTokenOfARank) {
  const GlobalInputs inputs = tiny(Layout::rank_major, 1);
  const RowPositions positions = find_row_positions(inputs);
  EXPECT_EQ(positions.ranks[0].counts, (Ints{2, 2}));
  EXPECT_EQ(positions.ranks[0].row_offsets, (Ints{0, 2, 4}));
  const RowMetadata metadata = row_metadata(inputs, positions, 0);
  EXPECT_EQ(metadata.source, (std::vector<Source>{{0, 0, -1}, {0, 1, -1}, {1, 0, -1}, {1, 1, -1}}));
  EXPECT_EQ(metadata.local_ids, (Ints{-1, 0, 1, -1, 0, 0, -1, 1}));
  EXPECT_EQ(metadata.weight, (std::vector<float>{0, 0.5f, 2, 0, 0.25f, 4, 0, 16}));
  EXPECT_EQ(positions.route(1, 0, 0).row, 2);
  EXPECT_EQ(positions.route(1, 0, 1).row, 2);
}

TEST(OracleRowPositions, RowsAreWrittenAndNothingElse) {
  GlobalInputs inputs = tiny(Layout::expert_major, 4);
  inputs.apply_weights = true;
  const RowPositions positions = find_row_positions(inputs);
  std::vector<float> memory(8 * kHidden, -7.0f);
  write_part(inputs, positions, 0, 0, reinterpret_cast<std::byte*>(memory.data()));
  std::vector<float> first_column;
  for (int row = 0; row < 8; ++row) first_column.push_back(memory[row * kHidden]);
  EXPECT_EQ(first_column, (std::vector<float>{0.5f, 0.75f, 12, -7, 4, 64, -7, -7}));  // weight * token
}

TEST(OracleRowPositions, MessagesAreCountedForEachTokenAndRemoteRank) {
  const RowPositions positions = find_row_positions(tiny(Layout::expert_major, 1));
  const Travel one_node{.topology = Topology({0, 0})};
  EXPECT_EQ(dispatch_messages(positions, one_node, 0).all(), 1);
  EXPECT_EQ(dispatch_messages(positions, one_node, 1).all(), 2);
  EXPECT_EQ(combine_messages(positions, one_node, 0, Reduction::partial).all(), 2);
  EXPECT_EQ(combine_messages(positions, one_node, 0, Reduction::exact).all(), 3);
  EXPECT_EQ(combine_messages(positions, one_node, 1, Reduction::exact).all(), 1);
}

// Expert rows that hold values[rank][row] in every column.
ExpertOutputs inputs_of(const std::vector<std::vector<float>>& values, Reduction reduction) {
  ExpertOutputs combine_inputs;
  combine_inputs.outputs = DType::fp32;
  combine_inputs.result = DType::fp32;
  combine_inputs.reduction = reduction;
  combine_inputs.weighted = true;
  for (const std::vector<float>& rank : values) {
    RankOutputs outputs;
    outputs.rows.resize(rank.size() * kHidden * sizeof(float));
    for (std::size_t i = 0; i < rank.size() * kHidden; ++i) {
      std::memcpy(outputs.rows.data() + i * sizeof(float), &rank[i / kHidden], sizeof(float));
    }
    outputs.weights.assign(rank.size(), 1.0f);
    combine_inputs.ranks.push_back(outputs);
  }
  return combine_inputs;
}

const Topology kOneNode = Topology::blocks(2, 1);

std::vector<float> first_column(const std::vector<std::byte>& rows) {
  std::vector<float> column;
  for (std::size_t at = 0; at < rows.size(); at += kHidden * sizeof(float)) {
    column.push_back(load(DType::fp32, rows.data() + at));
  }
  return column;
}

TEST(OracleCombine, PartialRoundsEachRanksSumAndExactDoesNot) {
  const GlobalInputs inputs = tiny(Layout::expert_major, 1);
  const RowPositions positions = find_row_positions(inputs);
  // Rank 0: expert 0 rows (0,0,1) (1,0,0) (1,0,1), expert 1 rows (0,1,0) (1,1,1). Rank 1: (0,0,0) (1,1,0).
  const std::vector<std::vector<float>> values{{0.5f, 1.0f, 1.0f / 256, 3, 5}, {1, 7}};
  ExpertOutputs combine_inputs = inputs_of(values, Reduction::partial);
  combine_inputs.ranks[0].weights = {1, 1, 1, 2, 0.5f};
  // Token 0 of rank 1: 1 + 1/256 is a tie between bf16 1 and 1 + 1/128 and becomes 1. Token 2 has no route.
  EXPECT_EQ(first_column(combined(inputs.config, positions, combine_inputs, kOneNode, 0)),
            (std::vector<float>{1.5f, 6}));
  EXPECT_EQ(first_column(combined(inputs.config, positions, combine_inputs, kOneNode, 1)),
            (std::vector<float>{1, 9.5f, 0}));
  combine_inputs.reduction = Reduction::exact;
  EXPECT_EQ(first_column(combined(inputs.config, positions, combine_inputs, kOneNode, 1)),
            (std::vector<float>{257.0f / 256, 9.5f, 0}));
  combine_inputs.reduction = Reduction::unreduced;
  EXPECT_EQ(first_column(combined(inputs.config, positions, combine_inputs, kOneNode, 1)),
            (std::vector<float>{1, 1.0f / 256, 7, 5, 0, 0}));
}

TEST(OracleCombine, SharedRowsAreAddedLast) {
  GlobalInputs inputs = tiny(Layout::expert_major, 1);
  inputs.config.shared_experts = 1;
  const RowPositions positions = find_row_positions(inputs);
  // Rank 1: its three shared rows, then (0,0,0) (1,1,0). Token 0 has its two routes on rank 0.
  ExpertOutputs outputs =
      inputs_of({{0, 0, 0.5f, 1.0f, 1.0f / 256, 3, 5}, {1.0f / 256, 16, 32, 1, 7}}, Reduction::partial);
  // Token 0: 1 + 1/256 is rounded to 1 on rank 0; the shared row is added to it in fp32.
  EXPECT_EQ(first_column(combined(inputs.config, positions, outputs, kOneNode, 1)),
            (std::vector<float>{257.0f / 256, 28, 32}));
  outputs.shared_outputs = true;
  EXPECT_EQ(first_column(combined(inputs.config, positions, outputs, kOneNode, 1)),
            (std::vector<float>{1, 12, 0}));
  EXPECT_EQ(first_column(returned_shared_rows(inputs.config, positions, outputs, 1)),
            (std::vector<float>{1.0f / 256, 16, 32}));
}

// Rank 0 is sent 8 rows, with 4 of padding, and rank 1 is sent 4.
TEST(OracleRowPositions, RowsPastTheMemoryOfARankOverflow) {
  const auto overflow = [](std::int64_t capacity, const std::vector<std::int64_t>& limits) {
    const Overflow found = find_overflow(find_row_positions(tiny(Layout::expert_major, 4, capacity)), limits);
    return std::vector<std::int64_t>{found.rank, found.capacity, found.needed, found.dropped};
  };
  EXPECT_EQ(overflow(0, {8, 4}), (std::vector<std::int64_t>{-1, 0, 0, 0}));
  EXPECT_EQ(overflow(0, {7, -1}), (std::vector<std::int64_t>{0, 7, 8, 1}));
  EXPECT_EQ(overflow(0, {8, 3}), (std::vector<std::int64_t>{1, 3, 4, 1}));
  EXPECT_EQ(overflow(0, {2, 1}), (std::vector<std::int64_t>{0, 2, 8, 9}));
  EXPECT_EQ(overflow(4, {-1, 3}), (std::vector<std::int64_t>{0, 4, 8, 3}));  // 2 routes and a row
}

TEST(OracleCombine, NodesRoundTheSumsOfTheirRanks) {
  // One token of rank 0, with an expert on each of four ranks. Between 256 and 512, bf16 has even integers.
  GlobalInputs inputs;
  inputs.config = {.experts = 4, .top_k = 4, .hidden = kHidden, .max_tokens = 1};
  inputs.config.placement = Placement::blocks(4, 4);
  inputs.format = Format::fp32();
  inputs.ranks.resize(4);
  inputs.ranks[0] = {.tokens = 1, .parts = {}, .ids = {0, 1, 2, 3}, .weights = {}};
  inputs.ranks[0].parts[0].resize(kHidden * sizeof(float));
  const RowPositions positions = find_row_positions(inputs);
  const ExpertOutputs combine_inputs = inputs_of({{256}, {1}, {3}, {1}}, Reduction::partial);
  const auto sum = [&](ReductionLevel level, const Topology& topology) {
    inputs.config.reduction_level = level;
    return first_column(combined(inputs.config, positions, combine_inputs, topology, 0));
  };
  const Topology halves({0, 0, 1, 1}), turns({0, 1, 0, 1}), one({0, 0, 0, 0});
  EXPECT_EQ(sum(ReductionLevel::rank, turns), std::vector<float>{261});
  EXPECT_EQ(sum(ReductionLevel::node, turns), std::vector<float>{262});   // 259 -> 260, and 2
  EXPECT_EQ(sum(ReductionLevel::node, halves), std::vector<float>{260});  // 257 -> 256, and 4
  EXPECT_EQ(sum(ReductionLevel::node, one), std::vector<float>{260});     // 261 -> 260
  EXPECT_EQ(sum(ReductionLevel::automatic, turns), std::vector<float>{262});
  EXPECT_EQ(sum(ReductionLevel::automatic, one), std::vector<float>{261});
}

TEST(OracleCombine, TopkWeightsAndRouteValues) {
  const GlobalInputs inputs = tiny(Layout::expert_major, 1);
  const RowPositions positions = find_row_positions(inputs);
  ExpertOutputs combine_inputs = inputs_of({{2, 4, 8, 16, 32}, {64, 128}}, Reduction::exact);
  combine_inputs.weighted = false;
  combine_inputs.topk_weighted = true;
  combine_inputs.ranks[0].topk_weights = {0.5f, 1, 2, 100};
  combine_inputs.ranks[0].row_values = {1, 2, 3, 4, 5};
  combine_inputs.ranks[1].row_values = {6, 7};
  EXPECT_EQ(first_column(combined(inputs.config, positions, combine_inputs, kOneNode, 0)),
            (std::vector<float>{34, 32}));
  EXPECT_EQ(returned_row_values(positions, combine_inputs, 0), (std::vector<float>{6, 1, 4, 0}));
  EXPECT_EQ(returned_row_values(positions, combine_inputs, 1), (std::vector<float>{2, 3, 7, 5, 0, 0}));
  EXPECT_EQ(values_at_rows(positions, {{10, 11, 12, 13}, {20, 21, 22, 23, 24, 25}}, 0),
            (std::vector<float>{11, 20, 21, 12, 23}));
}

TEST(OracleCombine, RankMajorAddsRowsWithoutWeights) {
  const GlobalInputs inputs = tiny(Layout::rank_major, 1);
  const RowPositions positions = find_row_positions(inputs);
  ExpertOutputs combine_inputs = inputs_of({{1, 2, 4, 1 + 1.0f / 256}, {32, 64}}, Reduction::partial);
  combine_inputs.weighted = false;
  EXPECT_EQ(first_column(combined(inputs.config, positions, combine_inputs, kOneNode, 0)),
            (std::vector<float>{33, 2}));
  EXPECT_EQ(first_column(combined(inputs.config, positions, combine_inputs, kOneNode, 1)),
            (std::vector<float>{4, 65, 0}));
}

TEST(OracleMetadata, HasSumPrefixAndMaximum) {
  const StepMetadata second = step_metadata({5, 0, 7}, 2);
  EXPECT_EQ(second.sum, 12);
  EXPECT_EQ(second.prefix, 5);
  EXPECT_EQ(second.maximum, 7);
}

}  // namespace
}  // namespace ferry::oracle
