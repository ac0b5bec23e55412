// Combines of CallRanks: their arguments, their kernels, and the comparison with the oracle.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include "kernels_on_host/call_ranks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "backends/cuda/combine/kernels/combine_kernel.cuh"
#include "oracle/combine.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/numbers.hpp"
#include "plan/shapes.hpp"
#include "seed.hpp"

namespace ferry::cuda {

// The memory of a block: see Grid::give_each_block().
alignas(128) std::byte FERRY_WIDTH::stream_memory[kStreamsBytes];

namespace {

using CombineKernel = void (*)(const CombineArguments&, CombineBlockState*);

template <class Traits>
CombineKernel combine_phase_of(Phase phase) {
  return phase == Phase::send ? &run_combine_block<Phase::send, Traits>
                              : &run_combine_block<Phase::receive, Traits>;
}

template <class Specialised, class Generic>
CombineKernel combine_kernel_of(Phase phase, bool specialised) {
  if (specialised) return &run_combine_block<Phase::fused, Specialised>;
  return phase == Phase::fused ? &run_combine_block<Phase::fused, Generic> : combine_phase_of<Generic>(phase);
}

constexpr float kScale = -0.3f;  // of the epilogue of a result that is added to

// As bf16_combine_phase_kernel().
CombineKernel bf16_combine_phase(Phase phase, Reduction reduction) {
  if (reduction == Reduction::exact)
    return combine_phase_of<SplitCombine<SpecialisedCombine<Reduction::exact, DType::bf16, false, false>>>(
        phase);
  return combine_phase_of<SplitCombine<SpecialisedCombine<Reduction::partial, DType::bf16, false, false>>>(
      phase);
}

}  // namespace

// As Lane::enqueue().
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
  if (form.adds_to_result) {
    call.adds_to_result = true;
    call.scale = kScale;
    const std::int64_t values = rank.tokens * config_.hidden;
    for (std::int64_t i = 0; i < values; ++i)
      oracle::store(outputs.result, static_cast<float>(i * 7 % 61 - 30 + index) / 8,
                    at(memory.result) + i * bytes_of(outputs.result));
    memory.residual =
        bytes_at(at(memory.result), static_cast<std::size_t>(values * bytes_of(outputs.result)));
  }
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
  const bool generic = form.generic || form.adds_to_result;
  const bool specialised = one_type && type != DType::fp16 && !generic && !form.split_phases &&
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
    if (form.split_phases && !gathers && !kWide && one_type && type == DType::bf16 && !generic &&
        outputs.reduction != Reduction::unreduced && !calls[0].weights_travel && !case_.row_values &&
        config_.shared_experts == 0)
      kernel = bf16_combine_phase(phase, outputs.reduction);
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
      hop.packs_own_rows = calls[static_cast<std::size_t>(r)].own_staged;
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
    std::vector<std::byte> expected = oracle::combined(config_, step.positions, outputs, topology, r);
    Combined& memory = combined_[static_cast<std::size_t>(r)];
    if (form.adds_to_result)
      expected = oracle::with_epilogue(outputs.result, std::move(expected), kScale, memory.residual.data());
    EXPECT_TRUE(bytes_at(at(memory.result), expected.size()) == expected) << "result";
    if (!case_.row_values) continue;
    EXPECT_EQ(memory.route_values, oracle::returned_row_values(step.positions, outputs, r));
  }
}

}  // namespace ferry::cuda
