// Launches before and after the kernel of a dispatch.
#include <algorithm>

#include "backends/cuda/dispatch/block_state.cuh"
#include "backends/cuda/dispatch/scale_tiles.cuh"
#include "backends/cuda/dispatch/shared_positions.cuh"
#include "base/integers.hpp"

namespace ferry::cuda {
namespace {

// --- the hash of replicated input: a sum over the routes, which threads may add in any order
// ----------------

constexpr int kHashThreads = 256;
constexpr std::int64_t kRoutesPerThread = 4;

__global__ void __launch_bounds__(kHashThreads)
    input_hash_kernel(const __grid_constant__ DispatchArguments call) {
  LaneState* const state = call.lane.state;
  const std::int64_t tokens = token_count(call, false), routes = tokens * call.lane.top_k,
                     threads = std::int64_t{gridDim.x} * kHashThreads;
  unsigned long long sum = 0;
#pragma unroll 4
  for (std::int64_t route = std::int64_t{blockIdx.x} * kHashThreads + threadIdx.x; route < routes;
       route += threads)
    sum += mixed_bits(static_cast<std::uint64_t>(route), static_cast<std::uint64_t>(id_at(call, route)));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(&state->hash_sum, sum);
  // The sums of the block's threads before its number; the last block takes the sum of all.
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0 || atomicInc(&state->hashed_blocks, gridDim.x - 1) != gridDim.x - 1) return;
  __threadfence();
  state->input_hash = mixed_bits(atomicExch(&state->hash_sum, 0ull), static_cast<std::uint64_t>(tokens));
}

// --- rows of shared experts: each warp takes a token, or a quarter of its row, and writes it to the token's
// row in every shared group
// ----------------------------------------------------------------------------------

constexpr int kSharedThreads = 512;

// The rows of one token: thread s has its row in the group of shared expert s, or -1.
struct TokenSharedRows {
  std::int32_t token, row;
  std::uint32_t threads;  // that have a row, one bit each
};

// [warp] Calls store(row) with the `row` of each thread in `threads`.
template <class Row, class Store>
__device__ __forceinline__ void for_each_row(std::uint32_t threads, Row row, Store store) {
#pragma unroll 1
  for (std::uint32_t left = threads; left != 0; left &= left - 1)
    store(std::int64_t{__shfl_sync(~0u, row, __ffs(static_cast<int>(left)) - 1)});
}

// [warp] Calls store(row) for each row of the token.
template <class Store>
__device__ __forceinline__ void for_each_row(const TokenSharedRows& of, Store store) {
  for_each_row(of.threads, of.row, store);
}

// [warp] Each thread writes the metadata of its row.
__device__ __forceinline__ void write_shared_metadata(const DispatchArguments& call,
                                                      const TokenSharedRows& of) {
  const auto shared = static_cast<int>(threadIdx.x % 32);
  if (of.row < 0) return;
  // A plan has its sources already.
  if (!call.by_plan) call.plan.sources[of.row] = {call.lane.rank, of.token, call.lane.top_k + shared};
  if (call.weight != nullptr) call.weight[of.row] = 1;
  if (call.dots != nullptr) call.dots[of.row] = 0;
  if (call.group_of_row != nullptr) call.group_of_row[of.row] = shared;
}

// [warp] Quantises some columns of the token's row.
__device__ __forceinline__ void write_encoded(const DispatchArguments& call, const TokenSharedRows& of,
                                              const Quarters& quarters) {
  const PartLayout &values = call.parts.part[0], &scales = call.parts.part[1];
  std::byte* const mine = call.received_parts[0] + of.row * values.row_bytes;
  const std::int64_t leading = call.leading_dimension[1],
                     scale_row = column_row(scales, of.row, call.group_rows, leading);
  const auto store_scales = [&](bool stores, std::int64_t offset, std::uint32_t word) {
    for_each_row(of.threads, scale_row, [&](std::int64_t row) {
      const std::int64_t element = offset / scales.element_bytes;
      std::byte* const to = call.received_parts[1] + element_offset(scales, row, element, leading) +
                            offset % scales.element_bytes;
      if (stores) *reinterpret_cast<std::uint32_t*>(to) = word;
    });
  };
  const std::byte* const from = token_row(call, 0, of.token);
  const EncodedRows to{mine, of.threads};
  if (call.encoding.is_two_level())
    return send_nvfp4_quarters(call, from, to, quarters, store_scales, [&](float g) {
      for_each_row(of, [&](std::int64_t row) {
        if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(call.received_parts[2])[row] = g;
      });
    });
  const ByteRange columns = encoded_columns(call.lane, quarters);
  if (call.encoding.is_mx()) return send_mx_as<8>(call.type, from, to, columns, call.encoding, store_scales);
  send_encoded_as<8>(call.type, from, to, columns, call.encoding, store_scales);
}

// [warp] Copies a slice of the token's row.
__device__ __forceinline__ void write_copies(const DispatchArguments& call, const TokenSharedRows& of,
                                             const Quarters& quarters) {
  for (int p = 0; p < call.parts.count; ++p) {
    const std::int64_t bytes = call.parts.part[p].row_bytes;
    const ByteRange range = ByteRange::of(quarters, bytes, kGranule);
    copy_granules<GenericDispatch::kGranulesAtOnce>(
        token_row(call, p, of.token), range, [&](const auto& granules, int at) {
          for_each_row(of, [&](std::int64_t row) {
            granules.store(call.received_parts[p] + row * bytes, at, range.end);
          });
        });
  }
}

__device__ __forceinline__ void write_token(const DispatchArguments& call, const TokenSharedRows& of,
                                            const Quarters& quarters) {
  if (of.threads == 0) return;
  if (quarters.first == 0) write_shared_metadata(call, of);
  if (call.input_scales != nullptr) {
    // As below. Each expert has a scale of its own.
    for (std::uint32_t left = quarters.first == 0 ? of.threads : 0; left != 0; left &= left - 1) {
      const int shared = __ffs(static_cast<int>(left)) - 1;
      encode_with_scale(call, token_row(call, 0, of.token), __shfl_sync(~0u, of.row, shared),
                        call.input_scales[call.lane.experts + shared]);
    }
  } else if (call.apply_weights) {
    // Rows that are computed stay whole.
    if (quarters.first == 0)
      for_each_row(of, [&](std::int64_t row) {
        compute_row(call, token_row(call, 0, of.token), static_cast<std::int32_t>(row), 1.0f);
      });
  } else if (call.encoding.quantises()) {
    write_encoded(call, of, quarters);
  } else {
    write_copies(call, of, quarters);
  }
}

__global__ void __launch_bounds__(kSharedThreads)
    shared_rows_kernel(const __grid_constant__ DispatchArguments call) {
  const LaneView& lane = call.lane;
  std::int64_t tokens, rows = lane.capacity_rows;
  if (call.by_plan) {
    // Dispatch refuses a plan that cannot be used.
    if (check_plan(lane, *call.plan.header, -1) != PlanFault::none) return;
    tokens = call.plan.header->tokens;
    rows = call.plan.header->total;  // that the caller has memory for
    // The caller may have fewer tokens than the plan; dispatch refuses that too.
    if (tokens > call.tokens) return;
  } else {
    tokens = token_count(call, false);
  }
  const SharedRows shared = shared_rows_of(lane, static_cast<std::int32_t>(tokens));
  const auto expert = static_cast<int>(threadIdx.x % 32);
  RowSlices::of(shared.count).for_each([&](std::int64_t index, const Quarters& quarters) {
    TokenSharedRows of{static_cast<std::int32_t>(shared.first + index), -1, 0};
    if (expert < lane.shared_experts) {
      const std::int64_t row = shared.row(expert, of.token);
      if (row < rows) of.row = static_cast<std::int32_t>(row);
    }
    of.threads = __ballot_sync(~0u, of.row >= 0);
    write_token(call, of, quarters);
  });
}

// --- scales as tiles
// ----------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kTileThreads)
    scale_tiles_kernel(const __grid_constant__ ScaleTileArguments call) {
  __shared__ ScaleTileState state;
  write_scale_tiles(call, &state);
}

// Blocks for this much work.
std::int64_t blocks_for(std::int64_t work, std::int64_t of_block) {
  return (work + of_block - 1) / of_block;
}

}  // namespace

const Kernel<DispatchArguments> kInputHashKernel{
    &input_hash_kernel, kHashThreads, "launch the hash of replicated input",
    [](const DispatchArguments& call, int most) {
      const std::int64_t routes = call.tokens * call.lane.top_k;
      return std::clamp<std::int64_t>(blocks_for(routes, kRoutesPerThread * kHashThreads), 1, most);
    }};
const Kernel<DispatchArguments> kSharedRowsKernel{
    &shared_rows_kernel, kSharedThreads, "launch the copy of shared rows",
    [](const DispatchArguments& call, int most) {
      const std::int64_t slices = kQuarters * std::max<std::int64_t>(call.tokens, 1);
      return std::min<std::int64_t>(blocks_for(slices, kSharedThreads / 32), most);
    }};
const Kernel<ScaleTileArguments> kScaleTilesKernel{
    &scale_tiles_kernel, kTileThreads, "launch the copy of scales to tiles",
    [](const ScaleTileArguments& call, int most) {
      const std::int64_t items = (row_tiles(call.rows) + call.groups) * ((call.words + 3) / 4);
      return std::clamp<std::int64_t>(blocks_for(items, kTileThreads / 32), 1, most);
    }};

}  // namespace ferry::cuda
