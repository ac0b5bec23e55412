// The launches of sliced/slices.hpp, with kernels that run on the host as fibers.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include "backends/cuda/sliced/agree.cuh"
#include "backends/cuda/sliced/move_rows.cuh"
#include "backends/cuda/sliced/segments.cuh"
#include "kernels_on_host/grid.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

template <class Body>
void run_grid(unsigned blocks, unsigned threads, Body body) {
  on_host::Grid grid(test::seed());
  grid.add(blocks, threads, [&](unsigned block) { body(block); });
  grid.run();
}

// A kernel of one block with a state in shared memory.
template <class State, class Body>
void run_block(unsigned threads, Body body) {
  State state{};
  run_grid(1, threads, [&](unsigned) { body(&state); });
}

}  // namespace

void launch_post_dispatch(const PostDispatchArguments& call, cudaStream_t) {
  run_block<AgreeState>(kAgreeThreads, [&](AgreeState* state) { post_dispatch(call, state); });
}
void launch_take_slice(const TakeSliceArguments& call, cudaStream_t) {
  run_block<AgreeState>(kAgreeThreads, [&](AgreeState* state) { take_slice(call, state); });
}
void launch_take_combine(const TakeCombineArguments& call, cudaStream_t) {
  run_block<AgreeState>(kAgreeThreads, [&](AgreeState* state) { take_combine(call, state); });
}
void launch_find_segments(const FindSegmentsArguments& call, cudaStream_t) {
  run_block<SegmentState>(kSegmentThreads, [&](SegmentState* state) { SegmentFinder(call, state).run(); });
}
void launch_copy_tokens(const CopyTokensArguments& call, int, cudaStream_t) {
  run_grid(2, kMoveThreads, [&](unsigned) { copy_tokens(call); });
}
void launch_pack_rows(const PackRowsArguments& call, int, cudaStream_t) {
  run_grid(2, kMoveThreads, [&](unsigned) { pack_rows(call); });
}
void launch_unpack_rows(const UnpackRowsArguments& call, int, cudaStream_t) {
  run_grid(2, kMoveThreads, [&](unsigned) { unpack_rows(call); });
}
void launch_pack_outputs(const PackOutputsArguments& call, int, cudaStream_t) {
  run_grid(2, kMoveThreads, [&](unsigned) { pack_outputs(call); });
}
void launch_copy_results(const CopyResultsArguments& call, int, cudaStream_t) {
  run_grid(2, kMoveThreads, [&](unsigned) { copy_results(call); });
}

}  // namespace ferry::cuda
