// Launches before and after the kernel of a combine.
#include <algorithm>

#include "backends/cuda/combine/epilogue.cuh"
#include "backends/cuda/combine/row_sums.cuh"
#include "backends/cuda/dispatch/shared_positions.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda {
namespace {

constexpr int kSharedThreads = 512;

// [warp] Stores some columns of `row` at `to`; null: +0.
__device__ __forceinline__ void copy_columns(const SharedOutputsArguments& call, const std::byte* row,
                                             std::byte* to, const Columns& columns) {
  const auto thread = static_cast<int>(threadIdx.x % 32), width = static_cast<int>(value_bytes(call.type));
  const ByteRange bytes{columns.begin * width, columns.end * width};
  if (row == nullptr) {
    for (int at = bytes.begin + 16 * thread; at < bytes.end; at += kGranule)
      *reinterpret_cast<uint4*>(to + at) = make_uint4(0, 0, 0, 0);
    return;
  }
  if (call.output_type == call.combine_type && call.type == call.combine_type)
    return copy_granules<kPieceAccesses>(
        row, bytes, [&](const auto& granules, int at) { granules.store(to, at, bytes.end); });
  for (int column = columns.begin + 4 * thread; column < columns.end; column += 128) {
    float value[4];
    load_four(call.output_type, row, column, value);
    if (call.output_type != call.combine_type) {
#pragma unroll
      for (float& each : value) each = rounded(call.combine_type, each);
    }
    store_values(call.type, to, column, value);
  }
}

__global__ void __launch_bounds__(kSharedThreads)
    shared_outputs_kernel(const __grid_constant__ SharedOutputsArguments call) {
  const LaneView& lane = call.lane;
  const PlanHeader& header = *call.plan.header;
  if (check_plan(lane, header, -1) != PlanFault::none) return;
  const std::int64_t tokens = header.tokens, total = header.total;
  const SharedRows shared = shared_rows_of(lane, header.tokens);
  const std::int64_t row_bytes = lane.hidden * value_bytes(call.type);
  RowSlices::of(lane.shared_experts * tokens).for_each([&](std::int64_t index, const Quarters& quarters) {
    const auto expert = static_cast<std::int32_t>(index) / static_cast<std::int32_t>(tokens);
    const std::int64_t row = shared.row(expert, index - expert * tokens);
    const bool kept = row >= 0 && row < total;
    copy_columns(call, kept ? call.outputs + row * call.output_stride : nullptr, call.to + index * row_bytes,
                 columns_of(quarters, lane.hidden));
  });
}

template <DType kType>
__global__ void __launch_bounds__(kEpilogueThreads)
    epilogue_kernel(const __grid_constant__ EpilogueArguments call) {
  run_epilogue<kType>(call);
}

constexpr const char* kEpilogue = "launch the epilogue of a combine";
std::int64_t epilogue_blocks(const EpilogueArguments& call, int most) {
  return std::clamp(call.lane.max_tokens, 1, most);
}

}  // namespace

const Kernel<SharedOutputsArguments> kSharedOutputsKernel{
    &shared_outputs_kernel, kSharedThreads, "launch the copy of shared experts' outputs",
    [](const SharedOutputsArguments& call, int most) {
      constexpr std::int64_t kWarps = kSharedThreads / 32;
      const std::int64_t slices = std::int64_t{kQuarters} * call.lane.shared_experts * call.lane.max_tokens;
      return std::min<std::int64_t>((slices + kWarps - 1) / kWarps, most);
    }};

const Kernel<EpilogueArguments> kEpilogueKernels[3] = {
    {&epilogue_kernel<DType::bf16>, kEpilogueThreads, kEpilogue, epilogue_blocks},
    {&epilogue_kernel<DType::fp16>, kEpilogueThreads, kEpilogue, epilogue_blocks},
    {&epilogue_kernel<DType::fp32>, kEpilogueThreads, kEpilogue, epilogue_blocks}};

}  // namespace ferry::cuda
