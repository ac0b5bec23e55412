// The steps of experts in slices, with kernels that run on the host as fibers. Include after the stand-in for
// CUDA.
#pragma once

#include "backends/cuda/sliced/agree.cuh"
#include "backends/cuda/sliced/move_rows.cuh"
#include "backends/cuda/sliced/segments.cuh"
#include "kernels_on_host/grid.hpp"
#include "seed.hpp"

namespace ferry::cuda {

class FiberSteps final : public sliced::SliceSteps {
 public:
  explicit FiberSteps(const LaneView& lane) : lane_(lane) {}

  void post_dispatch(const PostDispatch& call, Stream) override {
    run_block<AgreeState>(kAgreeThreads, call,
                          [](const auto& step, auto* state) { cuda::post_dispatch(step, state); });
  }
  void take_slice(const TakeSlice& call, Stream) override {
    run_block<AgreeState>(kAgreeThreads, call,
                          [](const auto& step, auto* state) { cuda::take_slice(step, state); });
  }
  void take_combine(const TakeCombine& call, Stream) override {
    run_block<AgreeState>(kAgreeThreads, call,
                          [](const auto& step, auto* state) { cuda::take_combine(step, state); });
  }
  void find_segments(const FindSegments& call, Stream) override {
    run_block<SegmentState>(kSegmentThreads, call,
                            [](const auto& step, auto* state) { SegmentFinder(step, state).run(); });
  }
  void copy_tokens(const CopyTokens& call, const StepSize&, Stream) override {
    run_grid(2, kMoveThreads, [&] { cuda::copy_tokens(call); });
  }
  void pack_rows(const PackRows& call, const StepSize&, Stream) override {
    run_grid(2, kMoveThreads, [&] { cuda::pack_rows(call); });
  }
  void unpack_rows(const UnpackRows& call, const StepSize&, Stream) override {
    run_grid(2, kMoveThreads, [&] { cuda::unpack_rows(call); });
  }
  void pack_outputs(const PackOutputs& call, const StepSize&, Stream) override {
    run_grid(2, kMoveThreads, [&] { cuda::pack_outputs(call); });
  }
  void copy_results(const CopyResults& call, const StepSize&, Stream) override {
    run_grid(2, kMoveThreads, [&] { cuda::copy_results(call); });
  }

 private:
  template <class Body>
  static void run_grid(unsigned blocks, unsigned threads, Body body) {
    on_host::Grid grid(test::seed());
    grid.add(blocks, threads, [&](unsigned) { body(); });
    grid.run();
  }
  // A kernel of one block with a state in shared memory.
  template <class State, class Call, class Body>
  void run_block(unsigned threads, const Call& call, Body body) {
    State state{};
    const SliceStep<Call> step{lane_, call, true};
    run_grid(1, threads, [&] { body(step, &state); });
  }

  const LaneView lane_;
};

}  // namespace ferry::cuda
