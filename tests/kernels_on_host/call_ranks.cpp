#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include "kernels_on_host/call_ranks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <span>

#include "backends/cuda/combine/combine_block.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/host/memory_layout.hpp"
#include "exchange/configuration.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/encode.hpp"
#include "oracle/numbers.hpp"
#include "plan/shapes.hpp"
#include "seed.hpp"

namespace ferry::cuda {

// The memory of a block: see Grid::give_each_block().
alignas(128) std::byte block_memory[256 << 10];
alignas(128) std::byte stream_memory[kStreamsBytes];

namespace {

constexpr std::byte kPoison{0xA5};
constexpr unsigned kBlocks = kWide ? 3 : 4;

using DispatchKernel = void (*)(const DispatchArguments&, const SendPartition&);
using CombineKernel = void (*)(const CombineArguments&, CombineBlockState*);

template <class Few, class Generic>
DispatchKernel dispatch_kernel_of(Phase phase, bool few) {
  if (few) return &run_dispatch_block<Phase::fused, Few>;
  if (phase == Phase::send) return &run_dispatch_block<Phase::send, Generic>;
  if (phase == Phase::receive) return &run_dispatch_block<Phase::receive, Generic>;
  return &run_dispatch_block<Phase::fused, Generic>;
}

// The kernels of a call whose rows are quantised, as launch_dispatch() chooses them.
template <Quantisation kQuantisation>
DispatchKernel quantising_kernel(const CallForm& form, bool gathers) {
  using Few = SpecialisedDispatch<kQuantisation, true>;
  if (form.few_tokens)
    return gathers ? &run_dispatch_block<Phase::fused, GatheredDispatch<Few>>
                   : &run_dispatch_block<Phase::fused, Few>;
  if (gathers || form.split_phases || form.generic || form.count_on_device) return nullptr;
  return form.by_plan ? &run_dispatch_block<Phase::fused, SpecialisedByPlan<kQuantisation>>
                      : &run_dispatch_block<Phase::fused, SpecialisedDispatch<kQuantisation, false>>;
}

template <class Specialised, class Generic>
CombineKernel combine_kernel_of(Phase phase, bool specialised) {
  if (specialised) return &run_combine_block<Phase::fused, Specialised>;
  if (phase == Phase::send) return &run_combine_block<Phase::send, Generic>;
  if (phase == Phase::receive) return &run_combine_block<Phase::receive, Generic>;
  return &run_combine_block<Phase::fused, Generic>;
}

template <class T>
std::vector<T> values_of(const void* memory, std::size_t count) {
  const auto* from = static_cast<const T*>(memory);
  return {from, from + count};
}

}  // namespace

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
  rank.tables = of_bytes(RoutingTables::bytes(config_.experts, ranks), std::byte{0});
  const RoutingTables tables = RoutingTables::at(at(rank.tables), config_.experts, ranks);
  int physical = 0;
  for (int peer = 0; peer < ranks; ++peer) {
    tables.capacity[peer] = group_capacity(config_, peer);
    tables.first_physical[peer] = physical;
    for (const int expert : config_.placement.experts_of(peer)) {
      tables.physical_of[expert] = static_cast<std::uint16_t>(physical);
      tables.expert_of[physical] = static_cast<std::uint16_t>(expert);
      tables.rank_of[physical] = static_cast<std::uint8_t>(peer);
      ++physical;
    }
  }
  tables.first_physical[ranks] = physical;
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
  view.row_order_hash = row_order_hash(config_);
  view.placement_version = config_.placement.version();
  view.signals = signals;
  view.exchange = device_layout(config_).exchange;
  for (int peer = 0; peer < ranks; ++peer)
    rank.sections.push_back(at(ranks_[static_cast<std::size_t>(peer)].symmetric));
  place_sections(rank.sections, &view);
  view.receive_buffers = view.exchange.lane_bytes();
  view.tables = at(rank.tables);
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

// As Lane::dispatch().
DispatchArguments CallRanks::dispatch_arguments(const contract::StepInputs& step, int index,
                                                const CallForm& form) {
  Rank& rank = ranks_[static_cast<std::size_t>(index)];
  const oracle::RankInputs& inputs = step.inputs.ranks[static_cast<std::size_t>(index)];
  const std::int64_t rows = rank.view.capacity_rows;
  DispatchArguments call{};
  call.lane = rank.view;
  call.terms = AgreedOptions::of(Operation::dispatch);
  call.parts = parts_of(step.inputs.format, config_.hidden);
  call.received = call.parts;
  call.message = device_message_layout(call.parts);
  call.encoding = encoding_of(step.inputs.format);
  call.type = step.inputs.type;
  if (call.encoding.is_nvfp4() && !call.encoding.row_scale) call.global_scale = &step.inputs.global_scale;
  const std::vector<std::int64_t> row_bytes =
      oracle::input_row_bytes(step.inputs.format, step.inputs.type, config_.hidden);
  for (std::size_t p = 0; p < row_bytes.size(); ++p) {
    rank.inputs[p] = of_bytes(static_cast<std::int64_t>(inputs.parts[p].size()), kPoison);
    std::copy(inputs.parts[p].begin(), inputs.parts[p].end(), at(rank.inputs[p]));
    call.part[p] = at(rank.inputs[p]);
    call.stride[p] = row_bytes[p];
  }
  rank.ids.assign(inputs.ids.begin(), inputs.ids.end());
  rank.tokens = static_cast<std::int32_t>(inputs.tokens);
  call.tokens = form.count_on_device ? config_.max_tokens : inputs.tokens;
  call.device_tokens = form.count_on_device ? &rank.tokens : nullptr;
  call.ids = rank.ids.data();
  call.weights = step.inputs.weighted ? inputs.weights.data() : nullptr;
  call.plan = rank.plan;
  call.by_plan = form.by_plan;
  call.own_memory = form.direct_write;
  call.own_staged = call.encoding.quantises() || (form.split_phases && !form.keeps_inputs);
  const unsigned senders = form.few_tokens ? 1 : 2;
  call.many_token_blocks = {static_cast<int>(senders), 0};
  call.few_token_blocks = {static_cast<int>(senders), 2};
  for (int p = 0; p < call.parts.count; ++p) {
    const PartLayout& part = call.parts.part[p];
    rank.parts[p] = of_bytes(part_bytes_total(part, rows, rank.view.groups), kPoison);
    rank.received[p] = at(rank.parts[p]);
    if (form.direct_write && p == 0) {
      rank.received[p] = rank.view.received_row(index, 0, 0);
      std::memset(rank.received[p], static_cast<int>(kPoison),
                  static_cast<std::size_t>(part_bytes_total(part, rows, rank.view.groups)));
    }
    call.received_parts[p] = rank.received[p];
    call.leading_dimension[p] = leading_dimension(part, rows);
  }
  const bool rank_major = config_.layout == Layout::rank_major;
  const auto slots = static_cast<std::size_t>(rows * (rank_major ? config_.top_k : 1));
  rank.weight.assign(slots, -7.0f);
  rank.local_ids.assign(rank_major ? slots : 0, -7);
  if (rank_major) call.local_ids = rank.local_ids.data();
  rank.group_of_row.assign(static_cast<std::size_t>(rows), -7);
  rank.counts.assign(static_cast<std::size_t>(rank.view.groups), -7);
  rank.row_offsets.assign(static_cast<std::size_t>(rank.view.groups) + 1, -7);
  if (step.inputs.weighted) call.weight = rank.weight.data();
  call.group_of_row = rank.group_of_row.data();
  call.counts = rank.counts.data();
  call.row_offsets = rank.row_offsets.data();
  EXPECT_LE(lay_out_block(&call), static_cast<std::int64_t>(sizeof block_memory));
  call.phase = form.split_phases ? Phase::send : Phase::fused;
  const int sending_blocks = form.split_phases ? static_cast<int>(kBlocks) : static_cast<int>(senders);
  call.partition = kWide ? SendPartition::whole(call.tokens, sending_blocks)
                         : SendPartition::of(call.tokens, sending_blocks);
  if (form.few_tokens) call.metadata_partition = SendPartition::whole(call.tokens, 1);
  return call;
}

void CallRanks::dispatch(const contract::StepInputs& step, const CallForm& form) {
  std::vector<DispatchArguments> calls;
  ++calls_;
  for (int r = 0; r < size(); ++r) {
    calls.push_back(dispatch_arguments(step, r, form));
    if (topology_) place_messages(calls.back(), r);
  }
  const bool gathers = config_.transfer == Transfer::gather;
  for (const Phase phase : {Phase::send, Phase::receive}) {
    const Phase as = form.split_phases ? phase : Phase::fused;
    using Few = SpecialisedDispatch<Quantisation::none, true>;
    const Quantisation quantisation = quantisation_of(calls[0].encoding);
    DispatchKernel kernel =
        gathers ? dispatch_kernel_of<GatheredDispatch<Few>, GatheredDispatch<GenericDispatch>>(
                      as, form.few_tokens)
                : dispatch_kernel_of<Few, GenericDispatch>(as, form.few_tokens);
    DispatchKernel quantising = nullptr;
    if (quantisation == Quantisation::fp8) quantising = quantising_kernel<Quantisation::fp8>(form, gathers);
    if (quantisation == Quantisation::mx)
      quantising = gathers ? quantising_kernel<Quantisation::microscaled>(form, gathers)
                           : quantising_kernel<Quantisation::mx>(form, gathers);
    if (quantisation == Quantisation::nvfp4)
      quantising = gathers ? quantising_kernel<Quantisation::microscaled>(form, gathers)
                           : quantising_kernel<Quantisation::nvfp4>(form, gathers);
    if (quantising != nullptr) kernel = quantising;
    on_host::Grid grid(test::seed() + static_cast<std::uint64_t>(step.index));
    grid.give_each_block(block_memory, static_cast<std::size_t>(lay_out_block(calls.data())));
    for (const DispatchArguments& call : calls) {
      // As the kernels that read N for the mode of few tokens.
      const SendPartition partition =
          form.few_tokens && form.count_on_device
              ? SendPartition::of(*call.device_tokens, call.few_token_blocks.senders)
              : call.partition;
      grid.add(kBlocks, kBlockThreads, [kernel, call, partition](unsigned) { kernel(call, partition); });
    }
    grid.run();
    if (!form.split_phases) break;
    if (carried() && phase == Phase::send) {
      carry_messages(calls, form);
    } else if (topology_ && phase == Phase::send) {
      std::vector<HopArguments> hops;
      for (int r = 0; r < size(); ++r) {
        const DispatchArguments& call = calls[static_cast<std::size_t>(r)];
        HopArguments& hop = hops.emplace_back(hop_arguments(r, HopContent::messages));
        hop.metadata_bytes = static_cast<std::int32_t>(sizeof(LLPacket)) * config_.top_k;
        hop.payload_bytes = call.message.bytes - hop.metadata_bytes;
        hop.sets_flags = true;
        hop.sent_tokens = call.plan.sent_tokens;
        if (form.by_plan) hop.counts = call.plan.tokens_between + std::int64_t{r} * size();
      }
      run_hops(hops, test::seed() + static_cast<std::uint64_t>(step.index));
    }
  }
  for (int r = 0; r < size(); ++r) compare_dispatch(step, r);
}

void CallRanks::compare_dispatch(const contract::StepInputs& step, int index) {
  Rank& rank = ranks_[static_cast<std::size_t>(index)];
  const oracle::RankRows& expected = step.positions.ranks[static_cast<std::size_t>(index)];
  SCOPED_TRACE("rank " + std::to_string(index));
  ASSERT_EQ(rank.error.call.value, 0u);
  EXPECT_EQ(rank.counts, expected.counts);
  EXPECT_EQ(rank.row_offsets, expected.row_offsets);
  EXPECT_EQ(rank.totals.total, expected.row_offsets.back());
  EXPECT_EQ(rank.totals.call, calls_);
  const oracle::RowMetadata metadata = oracle::row_metadata(step.inputs, step.positions, index);
  for (std::size_t row = 0; row < expected.rows.size(); ++row) {
    if (expected.rows[row].state == oracle::RowState::untouched) continue;
    if (expected.rows[row].source.slot >= config_.top_k) continue;  // shared rows have a kernel of their own
    EXPECT_EQ(rank.plan.sources[row], expected.rows[row].source) << "source of row " << row;
    EXPECT_EQ(rank.group_of_row[row], metadata.group_of_row[row]) << "group of row " << row;
    if (config_.layout == Layout::rank_major) {
      for (std::size_t k = 0; k < static_cast<std::size_t>(config_.top_k); ++k) {
        const std::size_t at = row * static_cast<std::size_t>(config_.top_k) + k;
        EXPECT_EQ(rank.local_ids[at], metadata.local_ids[at]) << "row " << row << ", slot " << k;
      }
    }
    if (!step.inputs.weighted || config_.layout == Layout::rank_major) continue;
    EXPECT_EQ(rank.weight[row], metadata.weight[row]) << "weight of row " << row;
  }
  const std::vector<oracle::PartShape> shapes = oracle::received_shapes(step.inputs, step.positions, index);
  for (std::size_t p = 0; p < shapes.size(); ++p) {
    const std::int64_t bytes = shapes[p].bytes_of(rank.view.capacity_rows, std::int64_t{rank.view.groups});
    std::vector<std::byte> image(static_cast<std::size_t>(bytes), kPoison);
    oracle::write_part(step.inputs, step.positions, index, static_cast<int>(p), image.data());
    if (config_.shared_experts > 0) continue;
    EXPECT_TRUE(values_of<std::byte>(rank.received[p], image.size()) == image) << "part " << p;
  }
  const Plan plan = Plan::over(at(rank.plan_memory), static_cast<std::size_t>(rank.plan.bytes));
  EXPECT_EQ(plan.tokens(), rank.tokens);
  EXPECT_EQ(plan.dropped(), step.positions.overflow.dropped);
  const auto counts = plan.counts(), between = plan.tokens_between();
  EXPECT_TRUE(std::ranges::equal(counts, step.positions.counts)) << "counts of the plan";
  EXPECT_TRUE(std::ranges::equal(between, step.positions.tokens_between)) << "tokens_between";
  for (int token = 0; token < rank.tokens; ++token) {
    for (int slot = 0; slot < config_.top_k; ++slot) {
      const oracle::RouteTarget& route = step.positions.route(index, token, slot);
      EXPECT_EQ(plan.destination(token, slot), route.destination) << token << ", " << slot;
      EXPECT_EQ(plan.row(token, slot), route.row) << token << ", " << slot;
    }
  }
}

// As Lane::combine().
CombineArguments CallRanks::combine_arguments(const oracle::ExpertOutputs& outputs, int index,
                                              const CallForm& form) {
  Rank& rank = ranks_[static_cast<std::size_t>(index)];
  Combined& memory = combined_[static_cast<std::size_t>(index)];
  const oracle::RankOutputs& mine = outputs.ranks[static_cast<std::size_t>(index)];
  const bool unreduced = outputs.reduction == Reduction::unreduced;
  memory.outputs = of_bytes(static_cast<std::int64_t>(mine.rows.size()), std::byte{0xff});
  std::copy(mine.rows.begin(), mine.rows.end(), at(memory.outputs));
  memory.result = of_bytes(
      config_.hidden * bytes_of(outputs.result) * rank.tokens * (unreduced ? config_.top_k : 1), kPoison);
  memory.topk_weights = mine.topk_weights;
  memory.row_values = mine.row_values;
  memory.row_values.resize(std::max<std::size_t>(mine.row_values.size(), 1));
  memory.route_values.assign(static_cast<std::size_t>(rank.tokens) * static_cast<std::size_t>(config_.top_k),
                             -7.0f);
  CombineArguments call{};
  call.lane = rank.view;
  call.phase = form.split_phases ? Phase::send : Phase::fused;
  call.terms = AgreedOptions::of(Operation::combine);
  call.plan = rank.plan;
  call.reduction = outputs.reduction;
  call.combine_type = config_.combine_type;
  call.row = combine_row_layout(config_.combine_type, config_.hidden, config_.top_k);
  call.outputs = at(memory.outputs);
  call.output_stride = config_.hidden * bytes_of(outputs.outputs);
  call.output_type = outputs.outputs;
  if (outputs.weighted) call.row_weights = memory.row_weights.data();
  call.result = at(memory.result);
  call.result_stride = config_.hidden * bytes_of(outputs.result);
  call.result_type = outputs.result;
  if (outputs.topk_weighted) call.topk_weights = memory.topk_weights.data();
  if (case_.row_values) {
    call.row_values = memory.row_values.data();
    call.route_values = memory.route_values.data();
  }
  call.weights_travel = call.reduction == Reduction::partial && outputs.topk_weighted;
  call.own_staged = (form.split_phases && !form.keeps_inputs) || outputs.outputs != config_.combine_type;
  call.senders = 2;
  call.shared_terms = config_.shared_experts;
  if (form.no_memory_without_rows && rank.plan.header->total == 0) {
    call.outputs = nullptr;
    call.row_values = nullptr;
    if (rank.tokens == 0) {
      call.result = nullptr;
      call.route_values = nullptr;
    }
  }
  return call;
}

void CallRanks::combine(const contract::StepInputs& step, const oracle::ExpertOutputs& outputs,
                        const CallForm& form) {
  ++calls_;
  combined_.clear();
  combined_.resize(ranks_.size());
  std::vector<CombineArguments> calls;
  for (int r = 0; r < size(); ++r) {
    if (outputs.weighted) {
      // The weights that have arrived with the rows.
      const oracle::RowMetadata metadata = oracle::row_metadata(step.inputs, step.positions, r);
      combined_[static_cast<std::size_t>(r)].row_weights = metadata.weight;
    }
    calls.push_back(combine_arguments(outputs, r, form));
    if (topology_) place_rows(calls.back(), r);
  }
  const bool gathers = config_.transfer == Transfer::gather;
  const DType type = config_.combine_type;
  const bool one_type = outputs.outputs == type && outputs.result == type;
  const bool specialised = one_type && type != DType::fp16 && !form.generic && !form.split_phases &&
                           !case_.row_values && !outputs.topk_weighted;
  for (const Phase phase : {Phase::send, Phase::receive}) {
    const Phase as = form.split_phases ? phase : Phase::fused;
    using Plain = SpecialisedCombine<Reduction::partial, DType::bf16, false, false>;
    using Shared = SpecialisedCombine<Reduction::partial, DType::fp32, false, true>;
    using Exact = SpecialisedCombine<Reduction::exact, DType::fp32, false, true>;
    CombineKernel kernel;
    if (gathers) {
      kernel = combine_kernel_of<GatheredCombine<Plain>, GatheredCombine<GenericCombine>>(
          as, specialised && type == DType::bf16 && config_.shared_experts == 0);
    } else if (type == DType::fp32) {
      kernel = outputs.reduction == Reduction::exact
                   ? combine_kernel_of<Exact, GenericCombine>(as, specialised)
                   : combine_kernel_of<Shared, GenericCombine>(as, specialised);
    } else {
      kernel = combine_kernel_of<Plain, GenericCombine>(as, specialised && config_.shared_experts == 0);
    }
    on_host::Grid grid(test::seed() + static_cast<std::uint64_t>(step.index));
    grid.give_each_block(stream_memory, kStreamsBytes);
    std::deque<std::vector<CombineBlockState>> states;
    for (CombineArguments& call : calls) {
      call.phase = as;
      auto& of_blocks = states.emplace_back(kBlocks);
      grid.add(kBlocks, kCombineThreads,
               [kernel, call, &of_blocks](unsigned block) { kernel(call, &of_blocks[block]); });
    }
    grid.run();
    if (!form.split_phases) break;
    if (!topology_ || phase != Phase::send) continue;
    if (carried()) {
      carry_rows(calls);
      continue;
    }
    const bool adds =
        config_.reduction_level == ReductionLevel::node && outputs.reduction == Reduction::partial;
    std::vector<HopArguments> hops;
    for (int r = 0; r < size(); ++r) {
      HopArguments& hop = hops.emplace_back(hop_arguments(r, adds ? HopContent::sums : HopContent::rows));
      hop.counts = calls[static_cast<std::size_t>(r)].packed.rows;
    }
    run_hops(hops, test::seed() + static_cast<std::uint64_t>(step.index));
    for (int r = 0; adds && r < size(); ++r) add_on_nodes(calls[static_cast<std::size_t>(r)], r);
  }
  const Topology topology = topology_ ? *topology_ : Topology::blocks(size(), 1);
  for (int r = 0; r < size(); ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    const Rank& rank = ranks_[static_cast<std::size_t>(r)];
    ASSERT_EQ(rank.error.call.value, 0u);
    EXPECT_EQ(rank.state.diagnostics.bad_sources.count, 0u);
    const std::vector<std::byte> expected = oracle::combined(config_, step.positions, outputs, topology, r);
    Combined& memory = combined_[static_cast<std::size_t>(r)];
    EXPECT_TRUE(values_of<std::byte>(at(memory.result), expected.size()) == expected) << "result";
    if (!case_.row_values) continue;
    EXPECT_EQ(memory.route_values, oracle::returned_row_values(step.positions, outputs, r));
  }
}

void CallRanks::run_step(int index, const CallForm& form) {
  const contract::StepInputs step = contract::make_inputs(case_, index);
  dispatch(step, form);
  if (testing::Test::HasFailure()) return;
  combine(step, contract::make_expert_outputs(case_, step), form);
}

}  // namespace ferry::cuda
