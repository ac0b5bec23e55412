#include "backends/cuda/sliced/slices.hpp"

#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/runtime/launch.hpp"
#include "backends/cuda/sliced/agree.cuh"
#include "backends/cuda/sliced/move_rows.cuh"
#include "backends/cuda/sliced/segments.cuh"

namespace ferry::cuda {
namespace {

__global__ void __launch_bounds__(kAgreeThreads)
    post_dispatch_kernel(const __grid_constant__ PostDispatchArguments call) {
  __shared__ AgreeState state;
  post_dispatch(call, &state);
}

__global__ void __launch_bounds__(kAgreeThreads)
    take_slice_kernel(const __grid_constant__ TakeSliceArguments call) {
  __shared__ AgreeState state;
  take_slice(call, &state);
}

__global__ void __launch_bounds__(kAgreeThreads)
    take_combine_kernel(const __grid_constant__ TakeCombineArguments call) {
  __shared__ AgreeState state;
  take_combine(call, &state);
}

__global__ void __launch_bounds__(kSegmentThreads)
    find_segments_kernel(const __grid_constant__ FindSegmentsArguments call) {
  __shared__ SegmentState state;
  SegmentFinder(call, &state).run();
}

__global__ void __launch_bounds__(kMoveThreads)
    copy_tokens_kernel(const __grid_constant__ CopyTokensArguments call) {
  copy_tokens(call);
}

__global__ void __launch_bounds__(kMoveThreads)
    pack_rows_kernel(const __grid_constant__ PackRowsArguments call) {
  pack_rows(call);
}

__global__ void __launch_bounds__(kMoveThreads)
    unpack_rows_kernel(const __grid_constant__ UnpackRowsArguments call) {
  unpack_rows(call);
}

__global__ void __launch_bounds__(kMoveThreads)
    pack_outputs_kernel(const __grid_constant__ PackOutputsArguments call) {
  pack_outputs(call);
}

__global__ void __launch_bounds__(kMoveThreads)
    copy_results_kernel(const __grid_constant__ CopyResultsArguments call) {
  copy_results(call);
}

}  // namespace

void prepare_slices() {
  load_kernels(&post_dispatch_kernel, &take_slice_kernel, &take_combine_kernel, &find_segments_kernel,
               &copy_tokens_kernel, &pack_rows_kernel, &unpack_rows_kernel, &pack_outputs_kernel,
               &copy_results_kernel);
}

void launch_post_dispatch(const PostDispatchArguments& arguments, cudaStream_t stream) {
  launch(&post_dispatch_kernel, arguments, kAgreeThreads, 1, stream, "launch the hash of a slice's ids");
}

void launch_take_slice(const TakeSliceArguments& arguments, cudaStream_t stream) {
  launch(&take_slice_kernel, arguments, kAgreeThreads, 1, stream, "launch the choice of a slice");
}

void launch_take_combine(const TakeCombineArguments& arguments, cudaStream_t stream) {
  launch(&take_combine_kernel, arguments, kAgreeThreads, 1, stream, "launch the check of slices' plans");
}

void launch_find_segments(const FindSegmentsArguments& arguments, cudaStream_t stream) {
  launch(&find_segments_kernel, arguments, kSegmentThreads, 1, stream, "launch the search of slices' rows");
}

void launch_copy_tokens(const CopyTokensArguments& arguments, int blocks, cudaStream_t stream) {
  launch(&copy_tokens_kernel, arguments, kMoveThreads, blocks, stream, "launch the copy of a slice");
}

void launch_pack_rows(const PackRowsArguments& arguments, int blocks, cudaStream_t stream) {
  launch(&pack_rows_kernel, arguments, kMoveThreads, blocks, stream, "launch the packing of a slice's rows");
}

void launch_unpack_rows(const UnpackRowsArguments& arguments, int blocks, cudaStream_t stream) {
  launch(&unpack_rows_kernel, arguments, kMoveThreads, blocks, stream,
         "launch the unpacking of slices' rows");
}

void launch_pack_outputs(const PackOutputsArguments& arguments, int blocks, cudaStream_t stream) {
  launch(&pack_outputs_kernel, arguments, kMoveThreads, blocks, stream, "launch the packing of outputs");
}

void launch_copy_results(const CopyResultsArguments& arguments, int blocks, cudaStream_t stream) {
  launch(&copy_results_kernel, arguments, kMoveThreads, blocks, stream, "launch the copy of slices' results");
}

}  // namespace ferry::cuda
