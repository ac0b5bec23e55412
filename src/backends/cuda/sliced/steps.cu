#include "backends/cuda/sliced/steps.hpp"

#include <algorithm>

#include "backends/cuda/runtime/run_kernel.cuh"
#include "backends/cuda/sliced/steps.cuh"

namespace ferry::cuda {
namespace {

constexpr std::int64_t kRowsOfBlock = kMoveThreads / 32;  // one row for each warp

const auto kPostDispatchKernel = kernel_of<SliceStep<PostDispatch>, post_dispatch, kStepThreads, AgreeState>(
    "launch the hash of a slice's ids");
const auto kTakeSliceKernel =
    kernel_of<SliceStep<TakeSlice>, take_slice, kStepThreads, AgreeState>("launch the choice of a slice");
const auto kTakeCombineKernel = kernel_of<SliceStep<TakeCombine>, take_combine, kStepThreads, AgreeState>(
    "launch the check of slices' plans");
const auto kFindSegmentsKernel =
    kernel_of<SliceStep<FindSegments>, find_segments, kStepThreads, SegmentState>(
        "launch the search of slices' rows");
const auto kCopyTokensKernel = kernel_of<CopyTokens, copy_tokens, kMoveThreads>("launch the copy of a slice");
const auto kPackRowsKernel =
    kernel_of<PackRows, pack_rows, kMoveThreads>("launch the packing of a slice's rows");
const auto kUnpackRowsKernel =
    kernel_of<UnpackRows, unpack_rows, kMoveThreads>("launch the unpacking of slices' rows");
const auto kPackOutputsKernel =
    kernel_of<PackOutputs, pack_outputs, kMoveThreads>("launch the packing of outputs");
const auto kCopyResultsKernel =
    kernel_of<CopyResults, copy_results, kMoveThreads>("launch the copy of slices' results");

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
