// Combine by source on a cuda backend: launches its kernels.
#include "backends/cuda/by_source/source_rows.hpp"
#include "backends/cuda/host/cuda_backend.hpp"

namespace ferry::cuda {

void CudaBackend::keep_ids(const KeepIdsCall& call) {
  kKeepIdsKernel({view_of(call.options.lane), call}, {.blocks = blocks_of_lane()}, call.options.stream);
}

void CudaBackend::describe_rows(const DescribeRowsCall& call) {
  const LaneView& view = view_of(call.options.lane);
  kDescribeRowsKernel({view, view_plan(call.received.plan.storage(), view.plan_shape), call},
                      {.blocks = blocks_of_lane()}, call.options.stream);
}

void CudaBackend::plan_return(const PlanReturnCall& call) {
  CallPointers pointers;
  pointers.add("src_info", call.src_info, 4);
  pointers.add("row_offsets", call.row_offsets, 4);
  pointers.add("counts", call.counts, 4);
  pointers.add("topk_ids", call.ids.data, bytes_of(call.ids.type));
  pointers.add("device_tokens", call.device_tokens, 4);
  require_usable(call.options.lane, "ep_combine", pointers);
  const LaneView& view = view_of(call.options.lane);
  launch_plan_return({view, view_plan(call.plan.storage(), view.plan_shape), call}, blocks_of_lane(),
                     call.options.stream);
}

void CudaBackend::check_returned(const CheckReturnedCall& call) {
  const LaneView& view = view_of(call.options.lane);
  kCheckReturnedKernel({view, view_plan(call.plan.storage(), view.plan_shape), call.returned}, {},
                       call.options.stream);
}

std::int64_t CudaBackend::scratch_bytes() const {
  return return_scratch_bytes(lanes_.front().view());
}

}  // namespace ferry::cuda
