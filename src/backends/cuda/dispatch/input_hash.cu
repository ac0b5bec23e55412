// Hashes the ids of a dispatch: a sum over the routes, which threads may add in any order.
#include "backends/cuda/dispatch/input_hash.hpp"

#include <algorithm>

#include "backends/cuda/device/mixed_bits.cuh"
#include "backends/cuda/dispatch/block_state.cuh"

namespace ferry::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kRoutesPerThread = 4;

__global__ void __launch_bounds__(kThreads)
    input_hash_kernel(const __grid_constant__ DispatchArguments call) {
  LaneState* const state = call.lane.state;
  const std::int64_t tokens = token_count(call, false), routes = tokens * call.lane.top_k,
                     threads = std::int64_t{gridDim.x} * kThreads;
  unsigned long long sum = 0;
#pragma unroll 4
  for (std::int64_t route = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; route < routes;
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

}  // namespace

void prepare_input_hash() {
  load_kernels(&input_hash_kernel);
}

void launch_input_hash(const DispatchArguments& arguments, int blocks, cudaStream_t stream) {
  const std::int64_t routes = arguments.tokens * arguments.lane.top_k, each = kRoutesPerThread * kThreads;
  const std::int64_t wanted = std::clamp<std::int64_t>((routes + each - 1) / each, 1, blocks);
  launch(&input_hash_kernel, arguments, kThreads, static_cast<int>(wanted), stream,
         "launch the hash of replicated input");
}

}  // namespace ferry::cuda
