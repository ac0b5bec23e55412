#include "backends/cuda/by_source/source_rows.hpp"

#include "backends/cuda/by_source/source_rows.cuh"
#include "backends/cuda/device/shared_copy.cuh"

namespace ferry::cuda {
namespace {

__global__ void __launch_bounds__(kSourceThreads)
    keep_ids_kernel(const __grid_constant__ KeepIdsArguments arguments) {
  keep_ids(arguments);
}

__global__ void __launch_bounds__(kSourceThreads)
    describe_rows_kernel(const __grid_constant__ DescribeRowsArguments arguments) {
  describe_rows(arguments);
}

// The first block checks the counts, the others clear.
__global__ void __launch_bounds__(kReturnThreads)
    start_return_kernel(const __grid_constant__ PlanReturnArguments arguments) {
  clear_return(arguments);
  if (blockIdx.x == 0) CountChecker(arguments).run();
}

__global__ void __launch_bounds__(kReturnThreads)
    place_rows_by_source_kernel(const __grid_constant__ PlanReturnArguments arguments) {
  place_rows(arguments);
}

__global__ void __launch_bounds__(kReturnThreads)
    finish_return_kernel(const __grid_constant__ PlanReturnArguments arguments) {
  ReturnFinisher(arguments).run();
}

__global__ void __launch_bounds__(kReturnThreads)
    check_returned_kernel(const __grid_constant__ CheckReturnedArguments arguments) {
  __shared__ unsigned long long first;
  check_returned(arguments, &first);
}

constexpr const char* kPlanReturn = "plan a combine by source";
const Kernel<PlanReturnArguments> start_return{&start_return_kernel, kReturnThreads, kPlanReturn},
    place_rows_by_source{&place_rows_by_source_kernel, kReturnThreads, kPlanReturn},
    finish_return{&finish_return_kernel, kReturnThreads, kPlanReturn};

}  // namespace

const Kernel<KeepIdsArguments> kKeepIdsKernel{&keep_ids_kernel, kSourceThreads,
                                              "launch the copy of a dispatch's ids"};
const Kernel<DescribeRowsArguments> kDescribeRowsKernel{&describe_rows_kernel, kSourceThreads,
                                                        "describe the rows of a dispatch"};
const Kernel<CheckReturnedArguments> kCheckReturnedKernel{&check_returned_kernel, kReturnThreads,
                                                          "launch the check of returned rows"};

void launch_plan_return(const PlanReturnArguments& arguments, int blocks, Stream stream) {
  start_return(arguments, {.blocks = blocks}, stream);
  place_rows_by_source(arguments, {.blocks = blocks}, stream);
  finish_return(arguments, {}, stream);
}

}  // namespace ferry::cuda
