// Kernels beside those of the phases of calls in two hops: calls that exchange headers alone.
#define FERRY_WIDE_KERNELS  // for groups of any size
#include "backends/cuda/two_hops/header_calls.hpp"

#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda {
namespace {

constexpr int kClearThreads = 256, kClearBlocksOfRank = 16;

__global__ void __launch_bounds__(kClearThreads) clear_inbox_kernel(const __grid_constant__ LaneView lane) {
  const int source = static_cast<int>(blockIdx.x) / kClearBlocksOfRank,
            first = static_cast<int>(blockIdx.x) % kClearBlocksOfRank * kClearThreads +
                    static_cast<int>(threadIdx.x);
  if (source == lane.rank) return;  // the send phase has stored what comes from this rank
  for (int i = first; i < lane.max_tokens * lane.top_k; i += kClearBlocksOfRank * kClearThreads)
    memory::slot_metadata(lane, lane.rank, 0, source, i / lane.top_k)[i % lane.top_k] = {0, 0};
}

__global__ void __launch_bounds__(32, 1) agree_kernel(const __grid_constant__ AgreeArguments call) {
  __shared__ CallHeader header;
  const LaneView& lane = call.lane;
  if (is_aborted(lane, kExchangeFailed)) return;
  const std::uint64_t number = lane.state->calls[0] + 1;
  if (threadIdx.x == 0) {
    header.terms = call.terms;
    set_epoch(*lane.epoch, &header);
    header.facts = make_header_facts(call.terms.operation, 0);
  }
  __syncwarp();
  agree_with_all(lane, number, header, true);
  store_call_number(lane, number);
}

__global__ void __launch_bounds__(32, 1) end_refusal_kernel(const __grid_constant__ LaneView lane) {
  if (is_aborted(lane, kExchangeFailed)) return;
  const std::uint64_t number = lane.state->calls[0] + 1;
  store_call_number(lane, number);
}

}  // namespace

const Kernel<LaneView> kClearInboxKernel{
    &clear_inbox_kernel, kClearThreads, "clear slot metadata",
    [](const LaneView& lane, int) { return std::int64_t{kClearBlocksOfRank} * lane.ranks; }};
const Kernel<AgreeArguments> kAgreeKernel{&agree_kernel, 32, "end a call of headers"};
const Kernel<LaneView> kEndRefusalKernel{&end_refusal_kernel, 32, "end a refusal"};

}  // namespace ferry::cuda
