#include "backends/cuda/dispatch/scale_tiles.cuh"

#include <algorithm>

#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {
namespace {

__global__ void __launch_bounds__(kTileThreads)
    scale_tiles_kernel(const __grid_constant__ ScaleTileArguments call) {
  __shared__ ScaleTileState state;
  write_scale_tiles(call, &state);
}

}  // namespace

void prepare_scale_tiles() {
  load_kernels(&scale_tiles_kernel);
}

void launch_scale_tiles(const ScaleTileArguments& arguments, int blocks, cudaStream_t stream) {
  const std::int64_t items = (row_tiles(arguments.rows) + arguments.groups) * ((arguments.words + 3) / 4),
                     warps = kTileThreads / 32;
  const std::int64_t needed = std::clamp<std::int64_t>((items + warps - 1) / warps, 1, blocks);
  launch(&scale_tiles_kernel, arguments, kTileThreads, static_cast<int>(needed), stream,
         "launch the copy of scales to tiles");
}

}  // namespace ferry::cuda
