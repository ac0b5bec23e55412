#include "backends/cuda/sliced/slices.hpp"

#include "backends/cuda/device/shared_copy.cuh"
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

const Kernel<PostDispatchArguments> kPostDispatchKernel{&post_dispatch_kernel, kAgreeThreads,
                                                        "launch the hash of a slice's ids"};
const Kernel<TakeSliceArguments> kTakeSliceKernel{&take_slice_kernel, kAgreeThreads,
                                                  "launch the choice of a slice"};
const Kernel<TakeCombineArguments> kTakeCombineKernel{&take_combine_kernel, kAgreeThreads,
                                                      "launch the check of slices' plans"};
const Kernel<FindSegmentsArguments> kFindSegmentsKernel{&find_segments_kernel, kSegmentThreads,
                                                        "launch the search of slices' rows"};
const Kernel<CopyTokensArguments> kCopyTokensKernel{&copy_tokens_kernel, kMoveThreads,
                                                    "launch the copy of a slice"};
const Kernel<PackRowsArguments> kPackRowsKernel{&pack_rows_kernel, kMoveThreads,
                                                "launch the packing of a slice's rows"};
const Kernel<UnpackRowsArguments> kUnpackRowsKernel{&unpack_rows_kernel, kMoveThreads,
                                                    "launch the unpacking of slices' rows"};
const Kernel<PackOutputsArguments> kPackOutputsKernel{&pack_outputs_kernel, kMoveThreads,
                                                      "launch the packing of outputs"};
const Kernel<CopyResultsArguments> kCopyResultsKernel{&copy_results_kernel, kMoveThreads,
                                                      "launch the copy of slices' results"};

}  // namespace ferry::cuda
