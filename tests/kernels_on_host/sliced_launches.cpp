// Launches of the kernels of sliced/slices.hpp, which run on the host as fibers.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <functional>
#include <map>
#include <utility>

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

using Run = std::function<void(const void* arguments)>;

// What runs in place of a kernel.
template <class Arguments, class Body>
std::pair<const void* const, Run> in_place_of(const Kernel<Arguments>& kernel, Body body) {
  return {kernel.handle, [body](const void* arguments) { body(*static_cast<const Arguments*>(arguments)); }};
}
template <class State, class Arguments>
auto in_block(const Kernel<Arguments>& kernel, unsigned threads, void (*body)(const Arguments&, State*)) {
  return in_place_of(kernel, [=](const Arguments& call) {
    run_block<State>(threads, [&](State* state) { body(call, state); });
  });
}
template <class Arguments>
auto in_grid(const Kernel<Arguments>& kernel, void (*body)(const Arguments&)) {
  return in_place_of(
      kernel, [=](const Arguments& call) { run_grid(2, kMoveThreads, [&](unsigned) { body(call); }); });
}

#ifndef FERRY_TEST_HAS_KERNELS
// Never called.
template <class Arguments>
void no_kernel(Arguments) {}
#endif

}  // namespace

#ifndef FERRY_TEST_HAS_KERNELS
const Kernel<PostDispatchArguments> kPostDispatchKernel{&no_kernel<PostDispatchArguments>, 0, ""};
const Kernel<TakeSliceArguments> kTakeSliceKernel{&no_kernel<TakeSliceArguments>, 0, ""};
const Kernel<CopyTokensArguments> kCopyTokensKernel{&no_kernel<CopyTokensArguments>, 0, ""};
const Kernel<FindSegmentsArguments> kFindSegmentsKernel{&no_kernel<FindSegmentsArguments>, 0, ""};
const Kernel<PackRowsArguments> kPackRowsKernel{&no_kernel<PackRowsArguments>, 0, ""};
const Kernel<UnpackRowsArguments> kUnpackRowsKernel{&no_kernel<UnpackRowsArguments>, 0, ""};
const Kernel<TakeCombineArguments> kTakeCombineKernel{&no_kernel<TakeCombineArguments>, 0, ""};
const Kernel<PackOutputsArguments> kPackOutputsKernel{&no_kernel<PackOutputsArguments>, 0, ""};
const Kernel<CopyResultsArguments> kCopyResultsKernel{&no_kernel<CopyResultsArguments>, 0, ""};
#endif

void launch(const void* kernel, void* arguments, int, std::size_t, const LaunchShape&, cudaStream_t,
            const char*) {
  static const std::map<const void*, Run> runs{
      in_block<AgreeState>(kPostDispatchKernel, kAgreeThreads, &post_dispatch),
      in_block<AgreeState>(kTakeSliceKernel, kAgreeThreads, &take_slice),
      in_block<AgreeState>(kTakeCombineKernel, kAgreeThreads, &take_combine),
      in_place_of(kFindSegmentsKernel,
                  [](const FindSegmentsArguments& call) {
                    run_block<SegmentState>(kSegmentThreads,
                                            [&](SegmentState* state) { SegmentFinder(call, state).run(); });
                  }),
      in_grid(kCopyTokensKernel, &copy_tokens),
      in_grid(kPackRowsKernel, &pack_rows),
      in_grid(kUnpackRowsKernel, &unpack_rows),
      in_grid(kPackOutputsKernel, &pack_outputs),
      in_grid(kCopyResultsKernel, &copy_results),
  };
  runs.at(kernel)(arguments);
}

}  // namespace ferry::cuda
