// The kernels of combine: a generic one, and specialised ones for common calls.
#include "backends/cuda/combine/combine.hpp"

#include "backends/cuda/combine/combine_block.cuh"

namespace ferry::cuda {
namespace {

template <class Traits>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const __grid_constant__ CombineArguments arguments) {
  __shared__ CombineBlockState state;
  run_combine_block<Phase::fused, Traits>(arguments, &state);
}

// The phases of a split call are one kernel, so that a profiler lists both under one name.
template <class Traits>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_phase_kernel(const __grid_constant__ CombineArguments arguments) {
  __shared__ CombineBlockState state;
  if (arguments.phase == Phase::send) {
    run_combine_block<Phase::send, Traits>(arguments, &state);
  } else {
    run_combine_block<Phase::receive, Traits>(arguments, &state);
  }
}

template <class Traits>
const void* kernel() {
  return reinterpret_cast<const void*>(&combine_kernel<Traits>);
}

const void* phase_kernel() {
  return reinterpret_cast<const void*>(&combine_phase_kernel<GenericCombine>);
}

template <Reduction kReduction, DType kType, bool kWeights>
const void* specialised_kernel(bool shared) {
  return shared ? kernel<SpecialisedCombine<kReduction, kType, kWeights, true>>()
                : kernel<SpecialisedCombine<kReduction, kType, kWeights, false>>();
}

template <Reduction kReduction, bool kWeights>
const void* specialised_kernel(DType type, bool shared) {
  switch (type) {
    case DType::bf16:
      return specialised_kernel<kReduction, DType::bf16, kWeights>(shared);
    case DType::fp16:
      return specialised_kernel<kReduction, DType::fp16, kWeights>(shared);
    case DType::fp32:
      break;
  }
  return specialised_kernel<kReduction, DType::fp32, kWeights>(shared);
}

// For gathered input, whose reduction is always partial.
template <bool kWeights>
const void* gathered_bf16_kernel() {
  return kernel<GatheredCombine<SpecialisedCombine<Reduction::partial, DType::bf16, kWeights, false>>>();
}

const void* gathered_phase_kernel() {
  return reinterpret_cast<const void*>(&combine_phase_kernel<GatheredCombine<GenericCombine>>);
}

const void* gathered_kernel_of(const CombineArguments& call) {
  if (call.phase != Phase::fused) return gathered_phase_kernel();
  const bool is_bf16 =
      call.combine_type == DType::bf16 && call.output_type == DType::bf16 && call.result_type == DType::bf16;
  const bool no_values = call.row_values == nullptr && call.route_values == nullptr;
  if (!is_bf16 || !no_values || call.shared_terms > 0) return kernel<GatheredCombine<GenericCombine>>();
  return call.weights_travel ? gathered_bf16_kernel<true>() : gathered_bf16_kernel<false>();
}

const void* kernel_of(const CombineArguments& call) {
  if (call.lane.to_every_rank()) return gathered_kernel_of(call);
  if (call.phase != Phase::fused) return phase_kernel();
  const bool one_type = call.output_type == call.combine_type && call.result_type == call.combine_type;
  const bool no_values = call.row_values == nullptr && call.route_values == nullptr;
  if (!one_type || !no_values || call.reduction == Reduction::unreduced) return kernel<GenericCombine>();
  const bool shared = call.shared_terms > 0;
  if (shared && !shared_terms_fit(call)) return kernel<GenericCombine>();
  if (call.reduction == Reduction::exact)
    return specialised_kernel<Reduction::exact, false>(call.combine_type, shared);
  return call.weights_travel ? specialised_kernel<Reduction::partial, true>(call.combine_type, shared)
                             : specialised_kernel<Reduction::partial, false>(call.combine_type, shared);
}

}  // namespace

void prepare_combine(int ranks) {
  if (takes_wide_kernels(ranks)) return prepare_wide_combine();
  for (const void* generic : {phase_kernel(), kernel<GenericCombine>(), gathered_phase_kernel(),
                              kernel<GatheredCombine<GenericCombine>>(), gathered_bf16_kernel<false>(),
                              gathered_bf16_kernel<true>()})
    allow_shared_bytes(generic, kStreamsBytes);
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    for (const bool shared : {false, true}) {
      allow_shared_bytes(specialised_kernel<Reduction::exact, false>(type, shared), kStreamsBytes);
      allow_shared_bytes(specialised_kernel<Reduction::partial, false>(type, shared), kStreamsBytes);
      allow_shared_bytes(specialised_kernel<Reduction::partial, true>(type, shared), kStreamsBytes);
    }
  }
}

void launch_combine(const CombineArguments& arguments, const LaunchShape& shape, cudaStream_t stream) {
  if (takes_wide_kernels(arguments.lane.ranks)) return launch_wide_combine(arguments, shape, stream);
  launch(kernel_of(arguments), const_cast<CombineArguments*>(&arguments), kCombineThreads, kStreamsBytes,
         shape, stream, "launch combine");
}

}  // namespace ferry::cuda
