// What the experts of a run do with rows on a GPU besides products of matrices. Everything is put on the
// stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ferry/types.hpp"
#include "format/parts.hpp"

namespace ferry::app {

// Arrived rows as they lie: values of `type`, or e4m3 codes with the scales of their blocks.
struct DeviceRows {
  const void* values;
  DType type;  // of the rows that experts read and write
  std::int64_t hidden;
  bool quantised;
  bool packed;  // scales are bytes of exponents
  const void* scales;
  PartLayout scale_part;
  std::int64_t scale_leading;
};

// Local experts and weights of a row's slots, [rows, top_k], -1 for none.
struct DeviceSlots {
  const std::int32_t* local_ids;
  const float* weights;
  int top_k;
};

// to[i] = row from[i] in DeviceRows::type; without `from`, row i.
void pick_rows(const DeviceRows& rows, const std::int32_t* from, std::int64_t count, void* to,
               cudaStream_t stream);

// to[row] = rows[row] * factor, from row `first` on.
void scale_rows(const DeviceRows& rows, std::int64_t first, std::int64_t count, float factor, void* to,
                cudaStream_t stream);

// to[row] = sum over the row's slots, ascending: fma(weight, rows[row] * factors[local expert] rounded to the
// type, sum).
void scale_and_add_rows(const DeviceRows& rows, const DeviceSlots& slots, const float* factors,
                        std::int64_t count, void* to, cudaStream_t stream);

// to[row] = sum over the row's slots, ascending: fma(weight, v[place], sum), where place [rows, top_k] is -1
// for a slot without a local expert. v and `to` have `rows.type`.
void add_rows(const DeviceRows& rows, const DeviceSlots& slots, const void* v, const std::int32_t* place,
              std::int64_t count, void* to, cudaStream_t stream);

// to[i] = silu(gate[i]) * up[i], rounded to `type`.
void gate_values(const float* gate, const float* up, std::int64_t count, DType type, void* to,
                 cudaStream_t stream);

}  // namespace ferry::app
