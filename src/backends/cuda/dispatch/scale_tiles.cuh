// The kernel that copies scales from rows to tiles of 128 rows x 4 blocks, and zeroes the rest of each tile.
#pragma once

#include "backends/cuda/dispatch/dispatch.hpp"
#include "format/parts.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// A block's shared memory.
struct ScaleTileState {
  std::int32_t count[kMaxExperts];      // rows of each group
  std::int32_t first[kMaxExperts + 1];  // rows of tiles that are written before each group's
  std::int64_t sum[32];
};

// `value`, limited to [0, most].
__device__ __forceinline__ std::int64_t within(std::int64_t value, std::int64_t most) {
  return value < 0 ? 0 : value < most ? value : most;
}

// Scale tiles of one call; counts and offsets come from the finished dispatch. After a failed call they
// may be arbitrary; all addresses then stay within the memory.
struct TileMap {
  const ScaleTileArguments& call;
  const ScaleTileState* state;
  std::int64_t rows, limit;  // rows, and rows of tiles, that there is memory for

  __device__ __forceinline__ static TileMap of(const ScaleTileArguments& call, const ScaleTileState* state) {
    std::int64_t rows = call.rows;
    if (call.by_plan != nullptr) rows = within(call.by_plan->total, rows);
    return {call, state, rows, row_tiles(rows) + call.groups};
  }
  // The group's first row of tiles.
  __device__ __forceinline__ std::int64_t offset(int group) const {
    return call.layout == Layout::expert_padded ? min(group * row_tiles(call.capacity), limit)
                                                : std::int64_t{state->first[group]};
  }
  // The group that has written row of tiles `number`: the last that begins there or before. Empty groups
  // begin where the next one does.
  __device__ __forceinline__ int group_of(std::int64_t number) const {
    int low = 0, high = call.groups;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (state->first[middle] <= number ? low : high) = middle;
    }
    return low;
  }
};

// [block] Fills in the state. All threads call it.
__device__ __forceinline__ void count_row_tiles(const TileMap& map, ScaleTileState* state) {
  const int groups = map.call.groups, thread = static_cast<int>(threadIdx.x);
  for (int group = thread; group < groups; group += static_cast<int>(blockDim.x)) {
    state->count[group] = static_cast<std::int32_t>(within(map.call.counts[group], map.rows));
  }
  __syncthreads();
  if (thread < 32) {
    const int each = (groups + 31) / 32, begin = min(thread * each, groups), end = min(begin + each, groups);
    std::int64_t before = 0;
    for (int group = begin; group < end; ++group) before += row_tiles(state->count[group]);
    state->sum[thread] = before;
    __syncwarp();
    before = 0;
    for (int other = 0; other < thread; ++other) before += state->sum[other];
    for (int group = begin; group < end; ++group) {
      state->first[group] = static_cast<std::int32_t>(min(before, map.limit));
      before += row_tiles(state->count[group]);
    }
    if (thread == 31) state->first[groups] = static_cast<std::int32_t>(min(before, map.limit));
  }
  __syncthreads();
}

// [warp] Copies up to four consecutive words of the 128 rows of row of tiles `number`: to four tiles. Thread
// l writes line l of each, which has the words of rows l, l + 32, l + 64 and l + 96.
__device__ __forceinline__ void copy_four_tiles(const TileMap& map, std::int64_t number, int first_word) {
  const ScaleTileArguments& call = map.call;
  const int group = map.group_of(number), thread = static_cast<int>(threadIdx.x % 32),
            words = min(call.words - first_word, 4);
  const std::int64_t of_group = number - map.state->first[group], to = map.offset(group) + of_group;
  if (to >= map.limit) return;
  const std::int64_t first_row = call.row_offsets[group];
  std::uint32_t word[4][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::int64_t position = of_group * kTileRows + 32 * i + thread, row = first_row + position;
    if (position >= map.state->count[group] || row < 0 || row >= map.rows) continue;
    const std::byte* const from = call.scales + (row * call.words + first_word) * kScaleBytes;
    if (call.words % 4 == 0) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      word[i][0] = all.x, word[i][1] = all.y, word[i][2] = all.z, word[i][3] = all.w;
      continue;
    }
#pragma unroll
    for (int w = 0; w < 4; ++w)
      if (w < words) word[i][w] = reinterpret_cast<const std::uint32_t*>(from)[w];
  }
  std::byte* const line = call.tiles + (to * call.words + first_word) * kTileBytes + 16 * thread;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (w < words)
      *reinterpret_cast<uint4*>(line + w * kTileBytes) =
          make_uint4(word[0][w], word[1][w], word[2][w], word[3][w]);
  }
}

// [block]
__device__ __forceinline__ void write_scale_tiles(const ScaleTileArguments& call, ScaleTileState* state) {
  const TileMap map = TileMap::of(call, state);
  count_row_tiles(map, state);
  if (blockIdx.x == 0) {
    for (int group = static_cast<int>(threadIdx.x); group <= call.groups;
         group += static_cast<int>(blockDim.x))
      call.tile_offsets[group] = static_cast<std::int32_t>(map.offset(group));
  }
  const int pieces = (call.words + 3) / 4;
  const std::int64_t items = std::int64_t{state->first[call.groups]} * pieces;
  const std::int64_t warps = gridDim.x * blockDim.x / 32;
#pragma unroll 1
  for (std::int64_t item = (blockIdx.x * blockDim.x + threadIdx.x) / 32; item < items; item += warps)
    copy_four_tiles(map, item / pieces, static_cast<int>(item % pieces) * 4);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
