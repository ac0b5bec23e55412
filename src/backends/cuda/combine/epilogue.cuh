// The epilogue of a combine, as one block executes it.
#pragma once

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/device/values.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kEpilogueThreads = 1024;

// [thread] 16 bytes of a row. `residual`: those at the same place, or null. Adding -0 changes no value.
template <DType kType>
__device__ __forceinline__ uint4 scaled_and_added(const uint4& result, const uint4* residual, float scale) {
  float value[kPerAccess<kType>], added[kPerAccess<kType>];
  unpack<kType>(result, value);
  if (residual != nullptr) unpack<kType>(*residual, added);
#pragma unroll
  for (int i = 0; i < kPerAccess<kType>; ++i)
    value[i] = __fmaf_rn(scale, value[i], residual != nullptr ? added[i] : -0.0f);
  return packed<kType>(value);
}

// [block] The combine before it has stored its number and whether it was aborted.
template <DType kType>
__device__ void run_epilogue(const EpilogueArguments& call) {
  const LaneView& lane = call.lane;
  const PlanHeader& header = *call.plan.header;
  if (check_plan(lane, header, -1) != PlanFault::none || is_aborted(lane, lane.state->calls[0])) return;
  const auto vectors = static_cast<unsigned>(lane.hidden / kPerAccess<kType>);
#pragma unroll 1
  for (std::int64_t token = blockIdx.x; token < header.tokens; token += gridDim.x) {
    auto* const row = reinterpret_cast<uint4*>(call.result + token * call.result_stride);
    const auto* const residual =
        call.residual != nullptr
            ? reinterpret_cast<const uint4*>(call.residual + token * call.residual_stride)
            : nullptr;
#pragma unroll 2
    for (unsigned i = threadIdx.x; i < vectors; i += blockDim.x)
      row[i] = scaled_and_added<kType>(row[i], residual != nullptr ? residual + i : nullptr, call.scale);
  }
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
