#include "backends/cuda/by_source/source_rows.hpp"

#include "backends/cuda/by_source/source_rows.cuh"
#include "backends/cuda/runtime/run_kernel.cuh"

namespace ferry::cuda {
namespace {

template <auto kRun>
Kernel<PlanReturnArguments> return_kernel() {
  return kernel_of<PlanReturnArguments, kRun, kReturnThreads>("plan a combine by source");
}
const auto kStartReturnKernel = return_kernel<start_return>(), kPlaceRowsKernel = return_kernel<place_rows>(),
           kFinishReturnKernel = return_kernel<finish_return>();

}  // namespace

const Kernel<KeepIdsArguments> kKeepIdsKernel =
    kernel_of<KeepIdsArguments, keep_ids, kSourceThreads>("launch the copy of a dispatch's ids");
const Kernel<DescribeRowsArguments> kDescribeRowsKernel =
    kernel_of<DescribeRowsArguments, describe_rows, kSourceThreads>("describe the rows of a dispatch");
const Kernel<CheckReturnedArguments> kCheckReturnedKernel =
    kernel_of<CheckReturnedArguments, check_returned, kReturnThreads, unsigned long long>(
        "launch the check of returned rows");

void launch_plan_return(const PlanReturnArguments& arguments, int blocks, Stream stream) {
  kStartReturnKernel(arguments, {.blocks = blocks}, stream);
  kPlaceRowsKernel(arguments, {.blocks = blocks}, stream);
  kFinishReturnKernel(arguments, {}, stream);
}

}  // namespace ferry::cuda
