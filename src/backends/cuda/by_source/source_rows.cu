#include "backends/cuda/by_source/source_rows.hpp"

#include "backends/cuda/by_source/plan_return.cuh"
#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/runtime/launch.hpp"

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

}  // namespace

void prepare_source_rows() {
  load_kernels(&keep_ids_kernel, &describe_rows_kernel, &start_return_kernel, &place_rows_by_source_kernel,
               &finish_return_kernel, &check_returned_kernel);
}

void launch_keep_ids(const KeepIdsArguments& arguments, int blocks, cudaStream_t stream) {
  launch(&keep_ids_kernel, arguments, kSourceThreads, blocks, stream, "launch the copy of a dispatch's ids");
}

void launch_describe_rows(const DescribeRowsArguments& arguments, int blocks, cudaStream_t stream) {
  launch(&describe_rows_kernel, arguments, kSourceThreads, blocks, stream, "describe the rows of a dispatch");
}

void launch_plan_return(const PlanReturnArguments& arguments, int blocks, cudaStream_t stream) {
  constexpr const char* kAction = "plan a combine by source";
  launch(&start_return_kernel, arguments, kReturnThreads, blocks, stream, kAction);
  launch(&place_rows_by_source_kernel, arguments, kReturnThreads, blocks, stream, kAction);
  launch(&finish_return_kernel, arguments, kReturnThreads, 1, stream, kAction);
}

void launch_check_returned(const CheckReturnedArguments& arguments, cudaStream_t stream) {
  launch(&check_returned_kernel, arguments, kReturnThreads, 1, stream, "launch the check of returned rows");
}

}  // namespace ferry::cuda
