// The compiled kernels of dispatch, from translation units of about equal compile time.
#pragma once

#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/dispatch/dispatch_mode.hpp"
#include "backends/cuda/dispatch/quantisation.hpp"

namespace ferry::cuda {

// Modes many_tokens, few_tokens and by_plan. The three stay in one translation unit: without by_plan the
// compiler changes the signatures of the wait functions, and the kernels of few_tokens spill.
const void* unquantised_kernel(DispatchMode mode);  // dispatch_unquantised.cu
const void* fp8_kernel(DispatchMode mode);          // dispatch_fp8.cu
const void* mx_kernel(DispatchMode mode);           // dispatch_mx.cu
const void* nvfp4_kernel(DispatchMode mode);        // dispatch_nvfp4.cu

const void* count_on_device_kernel(Quantisation quantisation);  // dispatch_count_on_device.cu

// Mode generic. The phases of a split call are one kernel, so that a profiler lists both under one name.
const void* generic_kernel(Phase phase);  // dispatch_generic.cu

// Both phases of a split call in mode many_tokens.
const void* phase_kernel(Quantisation quantisation);  // dispatch_phases.cu

// Tokens that go to every rank: modes few_tokens, count_on_device and generic; of split calls, generic.
const void* gathered_kernel(Phase phase, DispatchMode mode,
                            Quantisation quantisation);  // dispatch_gathered.cu

// Groups of more than kNarrowRanks ranks, in every mode: dispatch_wide.cu.
std::int64_t wide_dispatch_shared_bytes(const LaneView& lane);
void prepare_wide_dispatch(const LaneView& lane);
void launch_wide_dispatch(const DispatchArguments& arguments, const LaunchShape& shape, cudaStream_t stream);

}  // namespace ferry::cuda
