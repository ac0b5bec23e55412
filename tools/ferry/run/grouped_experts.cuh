// The experts of programs, as one block executes them. They read the groups' counts and offsets on the
// device, so that no host waits for them.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "format/parts.hpp"
#include "tools/ferry/run/gpu_expert_kernels.hpp"

namespace ferry::app {

inline constexpr int kProductThreads = 256, kProductTile = 64, kProductDepth = 16;

// [thread] One value of `type`, and one of a received row, decoded.
__device__ inline float load(DType type, const void* values, std::int64_t index) {
  if (type == DType::fp32) return static_cast<const float*>(values)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(values)[index];
  return type == DType::bf16 ? bf16_to_fp32(bits) : fp16_to_fp32(bits);
}

__device__ inline void store(DType type, void* values, std::int64_t index, float value) {
  if (type == DType::fp32) {
    static_cast<float*>(values)[index] = value;
  } else {
    static_cast<std::uint16_t*>(values)[index] =
        type == DType::bf16 ? fp32_to_bf16(value) : fp32_to_fp16(value);
  }
}

__device__ inline float value_of(const GpuRows& rows, std::int64_t row, std::int64_t column) {
  const Encoding& encoding = rows.encoding;
  if (!encoding.quantises()) return load(rows.type, rows.values, row * rows.hidden + column);
  const auto* codes = static_cast<const char*>(rows.values) + row * encoding.value_bytes(rows.hidden);
  const std::int64_t place = rows.groups.scale_row(rows.scale_part, row, rows.scale_leading);
  const float scale = received_scale(encoding, rows.scale_part, rows.scales, rows.scale_leading, place,
                                     column / encoding.block);
  const float row_scale = rows.row_scales != nullptr ? rows.row_scales[row] : rows.call_scale;
  return quantised_element(encoding, codes, column) * (scale * row_scale);
}

// [block] Multiplies the rows of each group by its factor. Blocks take rows in turn.
__device__ inline void scale_rows_of_groups(const GpuRows& rows, const GpuGroups& groups,
                                            const float* factors, void* to) {
  for (int group = 0; group < groups.count; ++group) {
    const std::int64_t first = groups.row_offsets[group], end = first + groups.counts[group];
    for (std::int64_t row = first + blockIdx.x; row < end; row += gridDim.x) {
      for (std::int64_t column = threadIdx.x; column < rows.hidden; column += blockDim.x)
        store(rows.type, to, row * rows.hidden + column, value_of(rows, row, column) * factors[group]);
    }
  }
}

// A tile of a product of one group's rows.
struct ProductTile {
  int group;
  std::int64_t first_row, rows, first_column;
};

// [block] Calls work(tile) for each tile of the rows of all groups and `columns`. Blocks take tiles in turn.
template <class Work>
__device__ void for_each_tile(const GpuGroups& groups, std::int64_t columns, Work work) {
  const std::int64_t across = (columns + kProductTile - 1) / kProductTile;
  std::int64_t tile = blockIdx.x;  // among those of the group and of later ones
  for (int group = 0; group < groups.count; ++group) {
    const std::int64_t rows = groups.counts[group];
    const std::int64_t tiles = (rows + kProductTile - 1) / kProductTile * across;
    for (; tile < tiles; tile += gridDim.x) {
      const std::int64_t row = tile / across * kProductTile;
      work(ProductTile{group, groups.row_offsets[group] + row, ::min(rows - row, std::int64_t{kProductTile}),
                       tile % across * kProductTile});
    }
    tile -= tiles;
  }
}

struct ProductMemory {
  float a[kProductDepth][kProductTile + 1];  // + 1: threads that load a column use different banks
  float b[2][kProductDepth][kProductTile];
};

// [block] One tile of a [rows, depth] times kMatrices matrices b [depth, columns]; `a_at(row, k)` and
// `b_at(matrix, k, column)` load a value. Each sum is added with k ascending. `emit(row, column, sums)` gets
// them.
template <int kMatrices, class A, class B, class Emit>
__device__ void multiply_tile(const ProductTile& tile, std::int64_t depth, std::int64_t columns,
                              ProductMemory* memory, A a_at, B b_at, Emit emit) {
  constexpr int kEach = kProductTile / 16;  // rows, and columns, of a thread
  const int thread = static_cast<int>(threadIdx.x), down = thread / 16, right = thread % 16;
  float sums[kMatrices][kEach][kEach] = {};
  for (std::int64_t begin = 0; begin < depth; begin += kProductDepth) {
    for (int i = thread; i < kProductTile * kProductDepth; i += kProductThreads) {
      const std::int64_t row = i / kProductDepth, k = begin + i % kProductDepth;
      memory->a[i % kProductDepth][row] = row < tile.rows && k < depth ? a_at(tile.first_row + row, k) : 0.0f;
      const std::int64_t column = tile.first_column + i % kProductTile, k_of_b = begin + i / kProductTile;
      for (int matrix = 0; matrix < kMatrices; ++matrix)
        memory->b[matrix][i / kProductTile][i % kProductTile] =
            column < columns && k_of_b < depth ? b_at(matrix, k_of_b, column) : 0.0f;
    }
    __syncthreads();
    for (int k = 0; k < kProductDepth; ++k) {
      for (int i = 0; i < kEach; ++i) {
        for (int j = 0; j < kEach; ++j) {
          for (int matrix = 0; matrix < kMatrices; ++matrix)
            sums[matrix][i][j] = fmaf(memory->a[k][down * kEach + i], memory->b[matrix][k][right + 16 * j],
                                      sums[matrix][i][j]);
        }
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kEach; ++i) {
    for (int j = 0; j < kEach; ++j) {
      const std::int64_t row = down * kEach + i, column = tile.first_column + right + 16 * j;
      if (row >= tile.rows || column >= columns) continue;
      float made[kMatrices];
      for (int matrix = 0; matrix < kMatrices; ++matrix) made[matrix] = sums[matrix][i][j];
      emit(tile.first_row + row, column, made);
    }
  }
}

// [block] activated [rows, inner] = silu(x gate) * (x up), rounded to GpuRows::type.
__device__ inline void gate_and_up(const GpuRows& rows, const GpuGroups& groups, const GpuSwiglu& swiglu,
                                   ProductMemory* memory) {
  const std::int64_t matrix_size = rows.hidden * swiglu.inner;
  for_each_tile(groups, swiglu.inner, [&](const ProductTile& tile) {
    multiply_tile<2>(
        tile, rows.hidden, swiglu.inner, memory,
        [&](std::int64_t row, std::int64_t k) { return value_of(rows, row, k); },
        [&](int matrix, std::int64_t k, std::int64_t column) {
          return load(rows.type, swiglu.weights,
                      (std::int64_t{3} * tile.group + matrix) * matrix_size + k * swiglu.inner + column);
        },
        [&](std::int64_t row, std::int64_t column, const float* sums) {
          const float gate = sums[0];
          store(rows.type, swiglu.activated, row * swiglu.inner + column,
                gate / (1.0f + expf(-gate)) * sums[1]);
        });
  });
}

// [block] to [rows, hidden] = activated down.
__device__ inline void down(const GpuRows& rows, const GpuGroups& groups, const GpuSwiglu& swiglu, void* to,
                            ProductMemory* memory) {
  const std::int64_t matrix_size = rows.hidden * swiglu.inner;
  for_each_tile(groups, rows.hidden, [&](const ProductTile& tile) {
    multiply_tile<1>(
        tile, swiglu.inner, rows.hidden, memory,
        [&](std::int64_t row, std::int64_t k) {
          return load(rows.type, swiglu.activated, row * swiglu.inner + k);
        },
        [&](int, std::int64_t k, std::int64_t column) {
          return load(rows.type, swiglu.weights,
                      (std::int64_t{3} * tile.group + 2) * matrix_size + k * rows.hidden + column);
        },
        [&](std::int64_t row, std::int64_t column, const float* sums) {
          store(rows.type, to, row * rows.hidden + column, sums[0]);
        });
  });
}

}  // namespace ferry::app
