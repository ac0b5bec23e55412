// A plan's header on the device: written at the end of a dispatch, and checked before the plan is used again.
#pragma once

#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/diagnostics.hpp"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// In place of kPlanMagic: the arrays of a combine by source have not made a plan (by_source/).
inline constexpr std::uint64_t kWrongArraysMagic = ~kPlanMagic;

// [thread] Makes the plan unusable until write_plan_header() completes it.
__device__ inline void start_plan_header(PlanHeader* header, std::int64_t tokens) {
  header->magic = 0;
  header->tokens = static_cast<std::int32_t>(tokens);
}

// The sums that a plan's header records: see PlanHeader.
struct PlanTotals {
  std::int64_t tokens, rows, dropped;
};

__device__ inline void write_plan_header(PlanHeader* to, const LaneView& lane, const Epoch& epoch,
                                         std::uint64_t number, const PlanTotals& totals) {
  PlanHeader header{};
  header.magic = kPlanMagic;
  header.config_hash = epoch.row_order_hash;
  header.placement_version = epoch.placement_version;
  header.call = number;
  header.shape = lane.plan_shape;
  header.rank = lane.rank;
  header.tokens = static_cast<std::int32_t>(totals.tokens);
  header.total = totals.rows;
  header.dropped = totals.dropped;
  header.check = header_check(header);
  *to = header;
}

// `tokens`: tokens of this call, or -1 for operations without tokens.
__device__ inline PlanFault check_plan(const LaneView& lane, const PlanHeader& header, std::int64_t tokens) {
  if (header.magic != kPlanMagic || header.check != header_check(header))
    return header.magic == kWrongArraysMagic ? PlanFault::arrays : PlanFault::damaged;
  if (header.config_hash != lane.epoch->row_order_hash) return PlanFault::configuration;
  if (header.rank != lane.rank) return PlanFault::rank;
  if (header.total < 0 || header.total > lane.capacity_rows || header.tokens < 0 ||
      header.tokens > lane.max_tokens) {
    return PlanFault::damaged;
  }
  if (tokens >= 0 && header.tokens != tokens) return PlanFault::tokens;
  return PlanFault::none;
}

// [warp] Sends `peer` a refusal in place of a header: its call of this number fails with the same error.
static __device__ __noinline__ void post_refusal(const LaneView& lane, std::uint64_t number, int peer,
                                                 Operation operation, const ErrorRecord& refusal) {
  if (threadIdx.x % 32 != 0) return;
  const int parity = static_cast<int>(number & 1);
  LLPacket* header = memory::header(lane, peer, parity, lane.rank);
  *memory::refusal(lane, peer, parity, lane.rank) = refusal;
  inject_fault(lane, KernelPoint::header);
  // Release, as a fence and relaxed stores: the refusal before the packets that announce it.
  fence_acq_rel_sys();
  store_packet_relaxed_sys(header + kHeaderFacts, {number, make_header_facts(operation, 0).word()});
  store_packet_relaxed_sys(header + kHeaderTerms, {number, 0});  // a hash that no call has
}

// [block] Waits for all peers' headers of an aborted call and ignores their content. Why: see
// await_all_headers().
static __device__ __noinline__ void drain_headers(const LaneView& lane, std::uint64_t number,
                                                  Operation operation) {
  int peer = static_cast<int>(threadIdx.x);
  std::uint64_t terms = 0;
  do {
    if (peer < lane.ranks && peer != lane.rank)
      await_header_word(lane, number, operation, peer, kHeaderTerms, &terms);
    peer += static_cast<int>(blockDim.x);
  } while (kWide && peer < lane.ranks);
  __syncthreads();
}

static __device__ __noinline__ void set_text(ErrorRecord* record, const char* text) {
  int i = 0;
  for (; text[i] != 0; ++i) record->text[i] = text[i];
  record->text[i] = 0;
}

// [block] Block 0: aborts a call whose plan cannot be used. Reports the error to the host and to all peers.
static __device__ __noinline__ void refuse_plan(const LaneView& lane, Operation operation,
                                                std::uint64_t number, const PlanHeader& header,
                                                PlanFault fault, std::int64_t tokens, ErrorRecord* refusal) {
  if (threadIdx.x == 0) {
    const bool wrong_rank = fault == PlanFault::rank;
    abort_call(lane, number, operation, DeviceError::Reason::bad_plan, lane.rank, static_cast<int>(fault),
               wrong_rank ? lane.rank : tokens, wrong_rank ? header.rank : header.tokens);
    *refusal = ErrorRecord{};
    refusal->kind = ErrorRecord::Kind::usage;
    switch (fault) {
      case PlanFault::configuration:
        set_text(refusal, "plan: made by an exchange of another configuration or placement");
        break;
      case PlanFault::rank:
        set_text(refusal, "plan: made on another rank");
        break;
      case PlanFault::arrays:
        set_text(refusal,
                 "ep_combine: its src_info, row_offsets and counts contradict each other or its topk_ids");
        break;
      case PlanFault::tokens:
        set_text(refusal, "dispatch: the number of tokens differs from the plan's");
        break;
      case PlanFault::outputs_and_result:
        set_text(refusal,
                 "combine: outputs is null for rows of the plan, or result for its tokens: for row_values "
                 "alone call return_values()");
        break;
      case PlanFault::values:
        set_text(refusal, "combine: row_values and route_values must both be given or both be absent");
        break;
      case PlanFault::weights:
        set_text(refusal, "combine: topk_weights is null for tokens of the plan");
        break;
      case PlanFault::null_values:
        set_text(refusal, operation == Operation::return_values
                              ? "return_values: row_values is null for rows, or route_values for tokens"
                              : "route_values: values is null for tokens, or row_values for rows");
        break;
      default:
        set_text(refusal, "plan: unfinished or damaged: its header does not match its checksum");
    }
  }
  __syncthreads();
  for (int peer = threadIdx.x / 32; peer < lane.ranks; peer += blockDim.x / 32) {
    if (peer != lane.rank) post_refusal(lane, number, peer, operation, *refusal);
  }
}

// [block] The last step of a call: stores the call number for this block and for blocks that this launch does
// not have. Every block thus has a number of its own and never waits for another block to learn it.
__device__ inline void store_call_number(const LaneView& lane, std::uint64_t number) {
  __syncthreads();
#pragma unroll 1
  for (unsigned block = blockIdx.x + threadIdx.x * gridDim.x; block < kMaxBlocks;
       block += blockDim.x * gridDim.x)
    lane.state->calls[block] = number;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
