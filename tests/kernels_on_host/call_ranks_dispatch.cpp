// Dispatches of CallRanks: their arguments, their kernels, and the comparison with the oracle.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include "kernels_on_host/call_ranks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "harness/random.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/encode.hpp"
#include "oracle/numbers.hpp"
#include "plan/shapes.hpp"
#include "seed.hpp"

namespace ferry::cuda {

// The memory of a block: see Grid::give_each_block().
alignas(128) std::byte FERRY_WIDTH::block_memory[256 << 10];

namespace {

using DispatchKernel = void (*)(const DispatchArguments&, const SendPartition&);

template <class Traits>
DispatchKernel dispatch_phase_of(Phase phase) {
  return phase == Phase::send ? &run_dispatch_block<Phase::send, Traits>
                              : &run_dispatch_block<Phase::receive, Traits>;
}

template <class Few, class Generic>
DispatchKernel dispatch_kernel_of(Phase phase, bool few) {
  if (few) return &run_dispatch_block<Phase::fused, Few>;
  return phase == Phase::fused ? &run_dispatch_block<Phase::fused, Generic>
                               : dispatch_phase_of<Generic>(phase);
}

// The kernel of a common split call.
DispatchKernel common_dispatch_phase(Phase phase, Quantisation quantisation) {
  if (quantisation == Quantisation::none) return dispatch_phase_of<ManyTokens<Quantisation::none>>(phase);
  if (quantisation == Quantisation::fp8) return dispatch_phase_of<ManyTokens<Quantisation::fp8>>(phase);
  return dispatch_phase_of<ManyTokens<Quantisation::microscaled>>(phase);
}

// The kernels of a call whose rows are quantised, as launch_dispatch() chooses them.
template <Quantisation kQuantisation>
DispatchKernel quantising_kernel(const CallForm& form, bool gathers) {
  using Few = FewTokens<kQuantisation>;
  if (form.few_tokens)
    return gathers ? &run_dispatch_block<Phase::fused, GatheredDispatch<Few>>
                   : &run_dispatch_block<Phase::fused, Few>;
  if (gathers || form.split_phases || form.generic || form.count_on_device) return nullptr;
  return form.by_plan ? &run_dispatch_block<Phase::fused, ByPlan<kQuantisation>>
                      : &run_dispatch_block<Phase::fused, ManyTokens<kQuantisation>>;
}

}  // namespace

// As Lane::enqueue().
DispatchArguments CallRanks::dispatch_arguments(const contract::StepInputs& step, int index,
                                                const CallForm& form) {
  Rank& rank = ranks_[static_cast<std::size_t>(index)];
  const oracle::RankInputs& inputs = step.inputs.ranks[static_cast<std::size_t>(index)];
  const std::int64_t rows = rank.view.capacity_rows;
  const RowRoom room = row_room(config_, index);
  DispatchArguments call{};
  call.group_rows = static_cast<std::int32_t>(room.group_rows);
  call.lane = rank.view;
  call.terms = AgreedOptions::of(Operation::dispatch);
  if (!form.row_limits.empty() && !form.by_plan)
    call.terms.option[kRowLimitOption] =
        std::max<std::int64_t>(form.row_limits[static_cast<std::size_t>(index)], 0);
  rank.state.diagnostics.overflows = DeviceDiagnostics::none().overflows;
  call.parts = parts_of(step.inputs.format, config_.hidden);
  call.received = call.parts;
  call.message = device_message_layout(call.parts);
  call.encoding = encoding_of(step.inputs.format);
  call.type = step.inputs.type;
  if (call.encoding.is_two_level() && !call.encoding.row_scale) call.global_scale = &step.inputs.global_scale;
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
    rank.parts[p] = of_bytes(part_bytes_total(part, room), kPoison);
    rank.received[p] = at(rank.parts[p]);
    if (form.direct_write && p == 0) {
      rank.received[p] = memory::received_row(rank.view, index, 0, 0);
      std::memset(rank.received[p], static_cast<int>(kPoison),
                  static_cast<std::size_t>(part_bytes_total(part, room)));
    }
    call.received_parts[p] = rank.received[p];
    call.leading_dimension[p] = leading_dimension(part, room);
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
    using Few = FewTokens<Quantisation::none>;
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
    const bool common = !gathers && !form.by_plan && config_.input != Input::replicated;
    if (!kWide && form.split_phases && common) kernel = common_dispatch_phase(phase, quantisation);
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
  for (int r = 0; r < size(); ++r) {
    compare_dispatch(step, r);
    compare_overflow(step.positions, r, form);
  }
}

void CallRanks::dispatch_past_row_limits(int index, CallForm form) {
  const contract::StepInputs step = contract::make_inputs(case_, index);
  contract::Random random(test::seed() + static_cast<std::uint64_t>(index));
  for (const oracle::RankRows& rows : step.positions.ranks) {
    const std::int64_t limit = rows.row_offsets.back() + random.between(-6, 1);
    form.row_limits.push_back(random.chance(0.3) ? -1 : std::max<std::int64_t>(limit, 1));
  }
  dispatch(step, form);
}

void CallRanks::compare_overflow(const oracle::RowPositions& positions, int rank,
                                 const CallForm& form) const {
  const DeviceDiagnostics& found = state(rank).diagnostics;
  const Overflow expected = oracle::find_overflow(positions, form.row_limits);
  const bool overflows = expected.dropped > 0 && !form.by_plan;
  EXPECT_EQ(found.overflows.count, overflows ? 1u : 0u);
  if (!overflows) return;
  EXPECT_EQ(found.overflow.rank, expected.rank);
  EXPECT_EQ(found.overflow.capacity, expected.capacity);
  EXPECT_EQ(found.overflow.needed, expected.needed);
  EXPECT_EQ(found.overflow.dropped, expected.dropped);
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
    EXPECT_TRUE(bytes_at(rank.received[p], image.size()) == image) << "part " << p;
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

}  // namespace ferry::cuda
