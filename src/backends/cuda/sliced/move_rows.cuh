// Moves rows between the calls of the lane inside: one row at a time by each warp.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/operations/gather.cuh"
#include "backends/cuda/sliced/agree.cuh"

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

// [warp] Executes the work on a row.
struct ThisWarp {
  __device__ __forceinline__ bool first() const { return index() == 0; }
  __device__ __forceinline__ int index() const { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ int threads() const { return 32; }
  __device__ __forceinline__ void copy(std::byte* to, const std::byte* from, std::int64_t bytes) const {
    copy_bytes(to, from, bytes);
  }
  // Rows are whole words.
  __device__ __forceinline__ void zero(std::byte* bytes, std::int64_t begin, std::int64_t end) const {
    auto* const words = reinterpret_cast<std::uint32_t*>(bytes);
    for (std::int64_t i = begin / 4 + index(); i < end / 4; i += 32) words[i] = 0;
  }
  __device__ __forceinline__ void store(std::byte* to, const SliceRowTail& tail) const {
    *reinterpret_cast<SliceRowTail*>(to) = tail;
  }
  __device__ __forceinline__ SliceRowTail load(const std::byte* from) const {
    return *reinterpret_cast<const SliceRowTail*>(from);
  }
  // Converts values of two bytes to fp32.
  __device__ __forceinline__ void widen(DType type, const std::byte* from, std::byte* to, int values) const {
    for (int column = 4 * index(); column < values; column += 128) {
      float value[4];
      load_four(type, from, column, value);
      *reinterpret_cast<uint4*>(to + 4 * static_cast<std::int64_t>(column)) =
          make_uint4(bits_of(value[0]), bits_of(value[1]), bits_of(value[2]), bits_of(value[3]));
    }
  }
};

__device__ inline void copy_tokens(const CopyTokens& call) {
  for_each_of_warps(call.state->count, [&](std::int64_t token) { copy_token(ThisWarp{}, call, token); });
}

__device__ inline void pack_rows(const PackRows& call) {
  for_each_of_warps(call.state->own_rows, [&](std::int64_t row) { pack_row(ThisWarp{}, call, row); });
}

__device__ inline void unpack_rows(const UnpackRows& call) {
  const std::int64_t rows = call.state->gathered;
  for_each_of_warps(rows + call.shape.local_experts, [&](std::int64_t index) {
    if (index < rows) {
      unpack_row(ThisWarp{}, call, index);
    } else {
      pad_group(ThisWarp{}, call, static_cast<int>(index - rows));
    }
  });
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const auto sent =
      static_cast<unsigned long long>(call.state->own_rows) * static_cast<unsigned>(call.shape.tp - 1);
  add_wire(&call.all_calls->dispatch_messages, sent);
  add_wire(&call.all_calls->dispatch_bytes, sent * static_cast<unsigned long long>(call.row_bytes));
}

__device__ inline void pack_outputs(const PackOutputs& call) {
  for_each_of_warps(call.state->gathered, [&](std::int64_t row) { pack_output(ThisWarp{}, call, row); });
}

__device__ inline void copy_results(const CopyResults& call) {
  for_each_of_warps(std::int64_t{call.state->tokens} * call.slots, [&](std::int64_t row) {
    copy_bytes(call.to + row * call.stride, call.from + row * call.row_bytes, call.row_bytes);
  });
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
