// Launches the kernel of a combine call: a generic one, or a specialised one for common calls.
#include "backends/cuda/combine/kernels/combine_kernel.cuh"

namespace ferry::cuda {
namespace {

const void* gathered_kernel_of(const CombineArguments& call) {
  const bool is_bf16 =
      call.combine_type == DType::bf16 && call.output_type == DType::bf16 && call.result_type == DType::bf16;
  const bool no_values = call.row_values == nullptr && call.route_values == nullptr;
  if (call.phase != Phase::fused || !is_bf16 || !no_values || call.shared_terms > 0 || call.adds_to_result)
    return gathered_combine_kernel(call.phase);
  return gathered_bf16_combine_kernel(call.weights_travel);
}

const void* kernel_of(const CombineArguments& call) {
  if (takes_wide_kernels(call.lane.ranks)) return wide_combine_kernel(call.phase);
  if (call.lane.to_every_rank()) return gathered_kernel_of(call);
  const bool one_type = call.output_type == call.combine_type && call.result_type == call.combine_type;
  const bool no_values = call.row_values == nullptr && call.route_values == nullptr;
  const bool shared = call.shared_terms > 0;
  if (!one_type || !no_values || call.reduction == Reduction::unreduced || call.adds_to_result ||
      (shared && !shared_terms_fit(call)))
    return generic_combine_kernel(call.phase);
  if (call.phase != Phase::fused) {
    const bool common = call.combine_type == DType::bf16 && !shared && !call.weights_travel;
    return common ? bf16_combine_phase_kernel(call.reduction) : generic_combine_kernel(call.phase);
  }
  return (shared ? shared_combine_kernel : plain_combine_kernel)(call.reduction, call.combine_type,
                                                                 call.weights_travel);
}

}  // namespace

void prepare_combine(int ranks) {
  constexpr Phase kKernelPhases[] = {Phase::fused, Phase::send};
  if (takes_wide_kernels(ranks)) {
    for (const Phase phase : kKernelPhases) allow_shared_bytes(wide_combine_kernel(phase), kStreamsBytes);
    return;
  }
  for (const Phase phase : kKernelPhases) {
    allow_shared_bytes(generic_combine_kernel(phase), kStreamsBytes);
    allow_shared_bytes(gathered_combine_kernel(phase), kStreamsBytes);
  }
  for (const Reduction reduction : {Reduction::exact, Reduction::partial})
    allow_shared_bytes(bf16_combine_phase_kernel(reduction), kStreamsBytes);
  for (const bool weights_travel : {false, true}) {
    allow_shared_bytes(gathered_bf16_combine_kernel(weights_travel), kStreamsBytes);
    for (const Reduction reduction : {Reduction::exact, Reduction::partial}) {
      for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
        allow_shared_bytes(plain_combine_kernel(reduction, type, weights_travel), kStreamsBytes);
        allow_shared_bytes(shared_combine_kernel(reduction, type, weights_travel), kStreamsBytes);
      }
    }
  }
}

void launch_combine(const CombineArguments& arguments, const LaunchShape& shape, cudaStream_t stream) {
  launch({kernel_of(arguments), kCombineThreads, kStreamsBytes, "launch combine"}, &arguments, shape, stream);
}

}  // namespace ferry::cuda
