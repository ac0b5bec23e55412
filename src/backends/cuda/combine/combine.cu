// Launches the kernel of a combine.
#include "backends/cuda/combine/combine.hpp"

#include "backends/cuda/combine/combine_kernel.cuh"

namespace ferry::cuda {
namespace {

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

const void* kernel_of(const CombineArguments& call) {
  if (call.phase != Phase::fused) return phase_kernel();
  const bool one_type = call.output_type == call.combine_type && call.result_type == call.combine_type;
  const bool no_values = call.row_values == nullptr && call.route_values == nullptr;
  if (!one_type || !no_values || call.reduction == Reduction::unreduced) return kernel<GenericCombine>();
  const bool shared = call.shared_terms > 0;
  if (call.reduction == Reduction::exact)
    return specialised_kernel<Reduction::exact, false>(call.combine_type, shared);
  return call.weights_travel ? specialised_kernel<Reduction::partial, true>(call.combine_type, shared)
                             : specialised_kernel<Reduction::partial, false>(call.combine_type, shared);
}

}  // namespace

void prepare_combine(int ranks) {
  if (ranks > kNarrowRanks) return prepare_wide_combine();
  for (const void* generic : {phase_kernel(), kernel<GenericCombine>()})
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
  if (arguments.lane.ranks > kNarrowRanks) return launch_wide_combine(arguments, shape, stream);
  launch(kernel_of(arguments), const_cast<CombineArguments*>(&arguments), kCombineThreads, kStreamsBytes,
         shape, stream, "launching combine");
}

}  // namespace ferry::cuda
