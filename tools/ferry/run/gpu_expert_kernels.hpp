// Kernels of the GPU experts of `ferry run`, other than matrix products. All functions enqueue on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ferry/types.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "tools/ferry/common/scale_row.hpp"

namespace ferry::app {

// Received rows in their layout: values of `type`, or quantised values with a scale for each block of
// columns.
struct GpuRows {
  const void* values;
  DType type;  // of the rows that experts read and write
  std::int64_t hidden;
  Encoding encoding;
  const void* scales;
  PartLayout scale_part;
  std::int64_t scale_leading;  // leading dimension
  const float* row_scales;     // of each row, or null
  float call_scale;            // of nvfp4
  ScaleGroups groups;
};

// Local experts and weights of all rows' slots, [rows, top_k]; local_ids is -1 for an expert of another rank.
struct GpuSlots {
  const std::int32_t* local_ids;
  const float* weights;
  int top_k;
};

// The groups of received rows by expert, in device memory.
struct GpuGroups {
  const std::int32_t* counts;
  const std::int32_t* row_offsets;
  int count;
};

// SwiGLU of all local experts. Weights: gate, up [hidden, inner] and down [inner, hidden] of GpuRows::type,
// expert after expert. `activated`: working memory [rows, inner] of that type.
struct GpuSwiglu {
  const void* weights;
  std::int64_t inner;
  void* activated;
};

// to[i] = row from[i], decoded to GpuRows::type. A null `from` means row i.
void gather_values(const GpuRows& rows, const std::int32_t* from, std::int64_t count, void* to,
                   cudaStream_t stream);

// The rows of all groups, whose counts are read on the device: to[row] = rows[row] * factors[group], or
// SwiGLU of its expert. A row's value does not depend on the rows beside it.
void scale_groups(const GpuRows& rows, const GpuGroups& groups, const float* factors, void* to,
                  cudaStream_t stream);
void swiglu_groups(const GpuRows& rows, const GpuGroups& groups, const GpuSwiglu& swiglu, void* to,
                   cudaStream_t stream);

// to[row] = sum over the row's slots in ascending order: sum = fma(weight, v, sum), where v is rows[row] *
// factors[local expert] rounded to GpuRows::type.
void scale_and_sum_slots(const GpuRows& rows, const GpuSlots& slots, const float* factors, std::int64_t count,
                         void* to, cudaStream_t stream);

// to[row] = sum over the row's slots in ascending order: sum = fma(weight, v[route_of_slot], sum). `v` and
// `to` have GpuRows::type. route_of_slot [rows, top_k] is -1 for a slot without a local expert.
void sum_slots(const GpuRows& rows, const GpuSlots& slots, const void* v, const std::int32_t* route_of_slot,
               std::int64_t count, void* to, cudaStream_t stream);

// to[i] = silu(gate[i]) * up[i], rounded to `type`.
void silu_times(const float* gate, const float* up, std::int64_t count, DType type, void* to,
                cudaStream_t stream);

}  // namespace ferry::app
