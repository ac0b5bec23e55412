#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include "kernels_on_host/call_ranks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "backends/cuda/device/routing_tables.hpp"
#include "backends/cuda/host/memory_layout.hpp"
#include "exchange/configuration.hpp"
#include "plan/shapes.hpp"
#include "seed.hpp"

namespace ferry::cuda {

CallRanks::Memory CallRanks::of_bytes(std::int64_t bytes, std::byte value) {
  Memory memory(static_cast<std::size_t>(bytes / static_cast<std::int64_t>(sizeof(Line)) + 1));
  std::memset(memory.data(), static_cast<int>(value), memory.size() * sizeof(Line));
  return memory;
}

void CallRanks::place_sections(std::vector<std::byte*>& sections, LaneView* view) {
  if (sections.size() <= kNarrowRanks) {
    std::copy(sections.begin(), sections.end(), view->symmetric);
  } else {
    view->symmetric[0] = reinterpret_cast<std::byte*>(sections.data());
  }
}

contract::TestCase call_case(std::uint64_t number, int ranks) {
  contract::TestCase c;
  c.seed = number;
  c.ranks = ranks;
  c.config.alignment = 2;
  c.masked = 0.2;
  c.masked_tokens = 0.2;
  c.bad_ids = 0.1;
  return c;
}

CallRanks::CallRanks(const contract::TestCase& c)
    : case_(c), config_(complete_config(c.config, c.ranks)), ranks_(static_cast<std::size_t>(c.ranks)) {
  if (config_.reduction_level == ReductionLevel::automatic) config_.reduction_level = ReductionLevel::rank;
  const ExchangeLayout layout = device_layout(config_).exchange;
  for (Rank& rank : ranks_) {
    rank.symmetric = of_bytes(device_layout(config_).bytes(), std::byte{0});
    std::memset(at(rank.symmetric) + layout.signals, 0xff,  // NaN in staging
                static_cast<std::size_t>(layout.lane_bytes() - layout.signals));
  }
  for (int r = 0; r < c.ranks; ++r) make_view(r);
  if (!c.nodes.empty()) {
    place_hops();
  } else if (config_.backend == BackendKind::collective) {
    topology_.emplace(Topology::blocks(c.ranks, 1));
    place_lanes();
  }
}

void CallRanks::gather_in_rounds(int rounds) {
  ++calls_;
  for (Rank& rank : ranks_) {
    for (std::uint64_t& number : rank.state.calls) number += static_cast<std::uint64_t>(rounds);
    rank.state.further_rounds += static_cast<std::uint64_t>(rounds - 1);
    rank.view.has_gathered = true;
  }
}

// As Lane::make_view() and the constructor of ExchangeState.
void CallRanks::make_view(int index) {
  Rank& rank = ranks_[static_cast<std::size_t>(index)];
  const int ranks = config_.placement.ranks();
  const std::vector<std::byte> tables = routing_tables(config_);
  rank.tables = of_bytes(static_cast<std::int64_t>(tables.size()), std::byte{0});
  std::ranges::copy(tables, at(rank.tables));
  rank.epoch = {kFirstEpoch, row_order_hash(config_), config_.placement.version()};
  const DeviceSignals signals = device_signals(config_);
  rank.block_counts = of_bytes(8 * std::int64_t{kMaxSenders} * signals.count_words, std::byte{0});
  rank.block_counted = of_bytes(8 * std::int64_t{kMaxSenders}, std::byte{0});
  rank.load.resize(static_cast<std::size_t>(config_.experts));
  rank.state.diagnostics = DeviceDiagnostics::none();
  rank.state.lowest_bad_id = ~0ull;
  LaneView& view = rank.view;
  view.rank = index;
  view.ranks = ranks;
  view.experts = config_.experts;
  view.top_k = config_.top_k;
  view.hidden = config_.hidden;
  view.max_tokens = config_.max_tokens;
  view.plan_shape = plan_shape(config_);
  view.most_ranks = view.plan_shape.most_ranks();
  view.layout = config_.layout;
  view.by_ranks = Divisor::of(ranks);
  view.by_others = Divisor::of(std::max(ranks - 1, 1));
  view.by_alignment = Divisor::of(config_.alignment);
  view.capacity = group_capacity(config_, index);
  view.capacity_rows = row_capacity(config_, index);
  view.groups = groups_of(config_, index);
  view.shared_experts = config_.shared_experts;
  view.shared_split = config_.shared_split;
  view.input = config_.input;
  view.zero_padding = config_.zero_padding;
  view.deadline = ~std::uint64_t{0};
  view.signals = signals;
  view.exchange = device_layout(config_).exchange;
  for (int peer = 0; peer < ranks; ++peer)
    rank.sections.push_back(at(ranks_[static_cast<std::size_t>(peer)].symmetric));
  place_sections(rank.sections, &view);
  view.receive_buffers = view.exchange.lane_bytes();
  view.tables = at(rank.tables);
  view.epoch = &rank.epoch;
  view.timeout_claimed = &rank.timeout_claimed;
  view.state = &rank.state;
  view.block_counts = reinterpret_cast<std::int32_t*>(at(rank.block_counts));
  view.block_counted = reinterpret_cast<Flag*>(at(rank.block_counted));
  view.load = rank.load.data();
  view.report = &rank.report;
  view.device_error = &rank.error;
  view.totals = &rank.totals;
  rank.plan_memory = of_bytes(view_plan(nullptr, view.plan_shape).bytes, kPoison);
  rank.plan = view_plan(at(rank.plan_memory), view.plan_shape);
}

void CallRanks::run_step(int index, const CallForm& form) {
  const contract::StepInputs step = contract::make_inputs(case_, index);
  dispatch(step, form);
  if (testing::Test::HasFailure()) return;
  combine(step, contract::make_expert_outputs(case_, step), form);
}

}  // namespace ferry::cuda
