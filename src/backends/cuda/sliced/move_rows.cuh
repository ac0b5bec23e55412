// Moves rows between the calls of the lane inside: one row at a time by each warp.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/operations/gather.cuh"
#include "backends/cuda/sliced/agree.cuh"
#include "backends/cuda/sliced/slices.hpp"
#include "plan/slot.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kMoveThreads = 512;

// [grid] Calls use(index) for every index below `count`, with a whole warp.
template <class Use>
__device__ __forceinline__ void for_each_of_warps(std::int64_t count, Use use) {
  const std::int64_t warps = std::int64_t{gridDim.x} * (kMoveThreads / 32);
#pragma unroll 1
  for (std::int64_t index = blockIdx.x + std::int64_t{gridDim.x} * (threadIdx.x / 32); index < count;
       index += warps)
    use(index);
}

__device__ __forceinline__ bool first_of_warp() {
  return threadIdx.x % 32 == 0;
}

__device__ inline void copy_tokens(const CopyTokensArguments& call) {
  const SliceState& slice = *call.state;
  for_each_of_warps(slice.count, [&](std::int64_t token) {
    for (int p = 0; p < call.parts; ++p) {
      copy_bytes(call.to[p] + token * call.row_bytes[p],
                 call.from[p] + (slice.first + token) * call.stride[p], call.row_bytes[p]);
    }
  });
}

__device__ inline void pack_rows(const PackRowsArguments& call) {
  const int tp = call.shape.tp;
  for_each_of_warps(call.state->own_rows, [&](std::int64_t row) {
    std::byte* to = call.to + row * call.row_bytes;
    for (int p = 0; p < call.parts; ++p) {
      copy_bytes(to, call.from[p] + row * call.part_bytes[p], call.part_bytes[p]);
      to += call.part_bytes[p];
    }
    if (!first_of_warp()) return;
    SliceRowTail tail{call.sources[row], call.weight != nullptr ? call.weight[row] : 0};
    const int from = tail.source.rank;
    if (from >= 0 && from < call.lane.ranks)
      tail.source.token +=
          static_cast<std::int32_t>(TokenSlice::of(call.terms[from].tokens, from % tp, tp).first);
    *reinterpret_cast<SliceRowTail*>(to) = tail;
  });
}

// The segment of a gathered row. The row must exist.
__device__ __forceinline__ int segment_of(const SegmentTables& tables, int segments, std::int64_t row) {
  int low = 0, high = segments;  // gathered_row[low] <= row < gathered_row[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tables.gathered_row[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ __forceinline__ int segments_of(const SliceShape& shape, int ranks) {
  return shape.local_experts * ranks;
}

// [warp] Unpacks one row.
__device__ inline void unpack_row(const UnpackRowsArguments& call, std::int64_t gathered_row) {
  const int segment = segment_of(call.tables, segments_of(call.shape, call.lane.ranks), gathered_row);
  const std::int64_t row = call.tables.row[segment] + gathered_row - call.tables.gathered_row[segment];
  const std::byte* from = call.from + gathered_row * call.row_bytes;
  for (int p = 0; p < call.parts; ++p) {
    copy_bytes(call.to[p] + row * call.part_bytes[p], from, call.part_bytes[p]);
    from += call.part_bytes[p];
  }
  if (!first_of_warp()) return;
  const auto tail = *reinterpret_cast<const SliceRowTail*>(from);
  call.sources[row] = tail.source;
  if (call.weight != nullptr) call.weight[row] = tail.weight;
  if (call.group_of_row != nullptr) {
    const int pair = segment / (call.lane.ranks / call.shape.tp);
    call.group_of_row[row] = pair % call.shape.local_experts;
  }
}

// [warp] Fills the padding rows of an expert.
__device__ inline void pad_group(const UnpackRowsArguments& call, int group) {
  const std::int64_t begin = call.row_offsets[group] + call.counts[group], end = call.row_offsets[group + 1];
  for (std::int64_t row = begin + threadIdx.x % 32; row < end; row += 32) {
    call.sources[row] = Source{};
    if (call.weight != nullptr) call.weight[row] = 0;
    if (call.group_of_row != nullptr) call.group_of_row[row] = -1;
  }
  if (!call.shape.zero_padding) return;
  for (int p = 0; p < call.parts; ++p) {
    auto* const words = reinterpret_cast<std::uint32_t*>(call.to[p]);
    const std::int64_t width = call.part_bytes[p] / 4;
    for (std::int64_t i = begin * width + threadIdx.x % 32; i < end * width; i += 32) words[i] = 0;
  }
}

__device__ inline void unpack_rows(const UnpackRowsArguments& call) {
  const std::int64_t rows = call.state->gathered;
  for_each_of_warps(rows + call.shape.local_experts, [&](std::int64_t index) {
    if (index < rows) {
      unpack_row(call, index);
    } else {
      pad_group(call, static_cast<int>(index - rows));
    }
  });
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const auto sent =
      static_cast<unsigned long long>(call.state->own_rows) * static_cast<unsigned>(call.shape.tp - 1);
  add_wire(&call.all_calls->wire.dispatch_messages, sent);
  add_wire(&call.all_calls->wire.dispatch_bytes, sent * static_cast<unsigned long long>(call.row_bytes));
}

// [warp] Converts values of two bytes to fp32.
__device__ inline void widen_row(DType type, const std::byte* from, std::byte* to, int hidden) {
  for (int column = 4 * static_cast<int>(threadIdx.x % 32); column < hidden; column += 128) {
    float value[4];
    load_four(type, from, column, value);
    *reinterpret_cast<uint4*>(to + 4 * static_cast<std::int64_t>(column)) =
        make_uint4(bits_of(value[0]), bits_of(value[1]), bits_of(value[2]), bits_of(value[3]));
  }
}

__device__ inline void pack_outputs(const PackOutputsArguments& call) {
  const std::int64_t row_bytes = call.hidden * value_bytes(call.type);
  const int own_pair = call.rank % call.shape.tp * call.shape.local_experts;
  for_each_of_warps(call.state->gathered, [&](std::int64_t gathered_row) {
    const int segment = segment_of(call.tables, segments_of(call.shape, call.ranks), gathered_row);
    const std::int64_t row = call.tables.row[segment] + gathered_row - call.tables.gathered_row[segment];
    const std::byte* const from = call.outputs + row * call.output_stride;
    std::byte* const to = call.to + gathered_row * row_bytes;
    if (call.type == call.output_type) {
      copy_bytes(to, from, row_bytes);
    } else {
      widen_row(call.output_type, from, to, call.hidden);
    }
    const std::int64_t own_row = gathered_row - call.tables.pair_first[own_pair];
    if (call.row_weights != nullptr && first_of_warp() && own_row >= 0 && own_row < call.state->own_rows)
      call.own_weights[own_row] = call.row_weights[row];
  });
}

__device__ inline void copy_results(const CopyResultsArguments& call) {
  for_each_of_warps(std::int64_t{call.state->tokens} * call.slots, [&](std::int64_t row) {
    copy_bytes(call.to + row * call.stride, call.from + row * call.row_bytes, call.row_bytes);
  });
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
