// Inputs of the experts on a GPU: their weights, and received rows as their kernels read them.
#pragma once

#include <vector>

#include "tools/ferry/common/gpu.hpp"
#include "tools/ferry/run/gpu_expert_kernels.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

// Weights of a rank's experts, in local order, on the current GPU.
struct GpuExpertWeights {
  GpuExpertWeights(const RunSpec& spec, const std::vector<int>& experts);

  GpuBuffer matrices;  // [local experts] gate, up, down, of RunSpec::type
  GpuBuffer factors;   // [local experts] of the scaling experts
};

GpuRows gpu_rows_of(const RunSpec& spec, const DispatchResult& received);

}  // namespace ferry::app
