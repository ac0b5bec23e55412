#include "backends/cuda/sliced/steps.hpp"

#include <algorithm>

#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/runtime/launch.hpp"
#include "backends/cuda/sliced/agree.cuh"
#include "backends/cuda/sliced/move_rows.cuh"
#include "backends/cuda/sliced/segments.cuh"

namespace ferry::cuda {
namespace {

constexpr std::int64_t kRowsOfBlock = kMoveThreads / 32;  // one row for each warp

__global__ void __launch_bounds__(kAgreeThreads)
    post_dispatch_kernel(const __grid_constant__ SliceStep<PostDispatch> step) {
  __shared__ AgreeState state;
  post_dispatch(step, &state);
}

__global__ void __launch_bounds__(kAgreeThreads)
    take_slice_kernel(const __grid_constant__ SliceStep<TakeSlice> step) {
  __shared__ AgreeState state;
  take_slice(step, &state);
}

__global__ void __launch_bounds__(kAgreeThreads)
    take_combine_kernel(const __grid_constant__ SliceStep<TakeCombine> step) {
  __shared__ AgreeState state;
  take_combine(step, &state);
}

__global__ void __launch_bounds__(kSegmentThreads)
    find_segments_kernel(const __grid_constant__ SliceStep<FindSegments> step) {
  __shared__ SegmentState state;
  SegmentFinder(step, &state).run();
}

__global__ void __launch_bounds__(kMoveThreads) copy_tokens_kernel(const __grid_constant__ CopyTokens call) {
  copy_tokens(call);
}

__global__ void __launch_bounds__(kMoveThreads) pack_rows_kernel(const __grid_constant__ PackRows call) {
  pack_rows(call);
}

__global__ void __launch_bounds__(kMoveThreads) unpack_rows_kernel(const __grid_constant__ UnpackRows call) {
  unpack_rows(call);
}

__global__ void __launch_bounds__(kMoveThreads)
    pack_outputs_kernel(const __grid_constant__ PackOutputs call) {
  pack_outputs(call);
}

__global__ void __launch_bounds__(kMoveThreads)
    copy_results_kernel(const __grid_constant__ CopyResults call) {
  copy_results(call);
}

const Kernel<SliceStep<PostDispatch>> kPostDispatchKernel{&post_dispatch_kernel, kAgreeThreads,
                                                          "launch the hash of a slice's ids"};
const Kernel<SliceStep<TakeSlice>> kTakeSliceKernel{&take_slice_kernel, kAgreeThreads,
                                                    "launch the choice of a slice"};
const Kernel<SliceStep<TakeCombine>> kTakeCombineKernel{&take_combine_kernel, kAgreeThreads,
                                                        "launch the check of slices' plans"};
const Kernel<SliceStep<FindSegments>> kFindSegmentsKernel{&find_segments_kernel, kSegmentThreads,
                                                          "launch the search of slices' rows"};
const Kernel<CopyTokens> kCopyTokensKernel{&copy_tokens_kernel, kMoveThreads, "launch the copy of a slice"};
const Kernel<PackRows> kPackRowsKernel{&pack_rows_kernel, kMoveThreads,
                                       "launch the packing of a slice's rows"};
const Kernel<UnpackRows> kUnpackRowsKernel{&unpack_rows_kernel, kMoveThreads,
                                           "launch the unpacking of slices' rows"};
const Kernel<PackOutputs> kPackOutputsKernel{&pack_outputs_kernel, kMoveThreads,
                                             "launch the packing of outputs"};
const Kernel<CopyResults> kCopyResultsKernel{&copy_results_kernel, kMoveThreads,
                                             "launch the copy of slices' results"};

class DeviceSteps final : public SliceSteps {
 public:
  DeviceSteps(const LaneView& lane, int blocks, bool late_errors)
      : lane_(lane), blocks_(blocks), late_errors_(late_errors) {}

  void post_dispatch(const PostDispatch& call, Stream stream) override {
    kPostDispatchKernel({lane_, call, late_errors_}, {}, stream);
  }
  void take_slice(const TakeSlice& call, Stream stream) override {
    kTakeSliceKernel({lane_, call, late_errors_}, {}, stream);
  }
  void take_combine(const TakeCombine& call, Stream stream) override {
    kTakeCombineKernel({lane_, call, late_errors_}, {}, stream);
  }
  void find_segments(const FindSegments& call, Stream stream) override {
    kFindSegmentsKernel({lane_, call, late_errors_}, {}, stream);
  }
  void copy_tokens(const CopyTokens& call, const StepSize& size, Stream stream) override {
    kCopyTokensKernel(call, shape_of(size), stream);
  }
  void pack_rows(const PackRows& call, const StepSize& size, Stream stream) override {
    kPackRowsKernel(call, shape_of(size), stream);
  }
  void unpack_rows(const UnpackRows& call, const StepSize& size, Stream stream) override {
    kUnpackRowsKernel(call, shape_of(size), stream);
  }
  void pack_outputs(const PackOutputs& call, const StepSize& size, Stream stream) override {
    kPackOutputsKernel(call, shape_of(size), stream);
  }
  void copy_results(const CopyResults& call, const StepSize& size, Stream stream) override {
    kCopyResultsKernel(call, shape_of(size), stream);
  }

 private:
  LaunchShape shape_of(const StepSize& size) const {
    const std::int64_t most = size.sm_limit > 0 ? std::min(size.sm_limit, blocks_) : blocks_;
    return {.blocks = static_cast<int>(
                std::clamp<std::int64_t>((size.rows + kRowsOfBlock - 1) / kRowsOfBlock, 1, most))};
  }

  const LaneView lane_;
  const int blocks_;
  const bool late_errors_;
};

}  // namespace

std::unique_ptr<sliced::SliceSteps> make_slice_steps(const LaneView& lane, int blocks, bool late_errors) {
  return std::make_unique<DeviceSteps>(lane, blocks, late_errors);
}

}  // namespace ferry::cuda
