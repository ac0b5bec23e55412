// The compiled kernels of dispatch: templates that translation units of about equal compile time instantiate,
// for the table in dispatch_launch.cu.
#pragma once

#include "backends/cuda/dispatch/dispatch_traits.cuh"

namespace ferry::cuda {

// For groups of more than kNarrowRanks ranks, in every mode: dispatch_wide.cu.
const void* wide_dispatch_kernel(Phase phase);
std::int64_t lay_out_wide_block(DispatchArguments* call);  // as lay_out_block()

}  // namespace ferry::cuda

namespace ferry::cuda::inline FERRY_WIDTH {

template <class Traits>
const void* fused_kernel();

// Both phases of a split call.
template <class Traits>
const void* split_kernel();

// The kernel of fused calls from ids whose token count is known on the device only.
template <class Few, class Many>
const void* counting_kernel();

template <Quantisation kQuantisation>
using ManyTokens = SpecialisedDispatch<kQuantisation, DispatchMode::many_tokens>;
template <Quantisation kQuantisation>
using FewTokens = SpecialisedDispatch<kQuantisation, DispatchMode::few_tokens>;
template <Quantisation kQuantisation>
using ByPlan = SpecialisedDispatch<kQuantisation, DispatchMode::by_plan>;
template <Quantisation kQuantisation>
using GatheredFewTokens = GatheredDispatch<FewTokens<kQuantisation>>;

}  // namespace ferry::cuda::inline FERRY_WIDTH
