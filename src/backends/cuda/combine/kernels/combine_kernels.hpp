// The compiled kernels of combine, from translation units that compile side by side.
#pragma once

#include "backends/cuda/combine/combine.hpp"

namespace ferry::cuda {

// For every kind of call, fused or in phases.
const void* generic_combine_kernel(Phase phase);  // combine_generic.cu

// Fused calls whose rows and results have one type and nothing beside them; reductions exact and partial.
const void* plain_combine_kernel(Reduction reduction, DType type, bool weights_travel);   // combine_plain.cu
const void* shared_combine_kernel(Reduction reduction, DType type, bool weights_travel);  // combine_shared.cu

// Both phases of a call in bf16 with nothing beside its rows, no shared experts and no weights that travel;
// reductions exact and partial.
const void* bf16_combine_phase_kernel(Reduction reduction);  // combine_phases.cu

// Gathered input, whose reduction is always partial: every kind of call, and fused ones in bf16.
const void* gathered_combine_kernel(Phase phase);               // combine_gathered.cu
const void* gathered_bf16_combine_kernel(bool weights_travel);  // combine_gathered.cu

// For groups of more than kNarrowRanks ranks: combine_wide.cu.
const void* wide_combine_kernel(Phase phase);

}  // namespace ferry::cuda
