// A plan's header on the device: written at the end of a dispatch, looked at before a plan is used again.
#pragma once

#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/plan_fault.hpp"

namespace ferry::cuda {

// The plan is being made: it cannot be used until write_plan_header.
__device__ inline void start_plan_header(PlanHeader* header, std::int64_t tokens) {
  header->magic = 0;
  header->tokens = static_cast<std::int32_t>(tokens);
}

__device__ inline void write_plan_header(PlanHeader* to, const LaneView& lane, std::uint64_t number,
                                         std::int64_t tokens, std::int64_t total, std::int64_t dropped) {
  PlanHeader header{};
  header.magic = kPlanMagic;
  header.config_hash = lane.row_order_hash;
  header.placement_version = lane.placement_version;
  header.call = number;
  header.shape = lane.plan_shape;
  header.rank = lane.rank;
  header.tokens = static_cast<std::int32_t>(tokens);
  header.total = total;
  header.dropped = dropped;
  header.check = header_check(header);
  *to = header;
}

// `tokens`: of this call, or -1 where it brings none.
__device__ inline PlanFault fault_of(const LaneView& lane, const PlanHeader& header, std::int64_t tokens) {
  if (header.magic != kPlanMagic || header.check != header_check(header)) return PlanFault::damaged;
  if (header.config_hash != lane.row_order_hash) return PlanFault::configuration;
  if (header.rank != lane.rank) return PlanFault::rank;
  if (header.total < 0 || header.total > lane.capacity_rows || header.tokens < 0 ||
      header.tokens > lane.max_tokens) {
    return PlanFault::damaged;
  }
  if (tokens >= 0 && header.tokens != tokens) return PlanFault::tokens;
  return PlanFault::none;
}

// By one whole warp: ends the peer's call of this number with `refusal`.
static __device__ __noinline__ void post_refusal(const LaneView& lane, std::uint64_t number, int peer,
                                                 Operation operation, const ErrorRecord& refusal) {
  if (threadIdx.x % 32 != 0) return;
  const int parity = static_cast<int>(number & 1);
  LLPacket* header = lane.header(peer, parity, lane.rank);
  *lane.refusal(peer, parity, lane.rank) = refusal;
  inject_fault(lane, Point::header);
  // Release, as a fence and relaxed stores: the refusal before the units that announce it.
  fence_acq_rel_sys();
  store_packet_relaxed_sys(header + kHeaderFacts, {number, facts_of(operation, 0).word()});
  store_packet_relaxed_sys(header + kHeaderTerms, {number, 0});  // nobody's: all who call find a difference
}

// By the whole block: waits for everybody's letter of a call whose content does not matter here any more.
static __device__ __noinline__ void await_all(const LaneView& lane, std::uint64_t number,
                                              Operation operation) {
  const int peer = static_cast<int>(threadIdx.x);
  std::uint64_t terms = 0;
  if (peer < lane.ranks && peer != lane.rank) await_word(lane, number, operation, peer, kHeaderTerms, &terms);
  __syncthreads();
}

static __device__ __noinline__ void set_text(ErrorRecord* record, const char* text) {
  int i = 0;
  for (; text[i] != 0; ++i) record->text[i] = text[i];
  record->text[i] = 0;
}

// By the whole of block 0: the plan of this call cannot be used. Tells the host and the peers.
static __device__ __noinline__ void refuse_plan(const LaneView& lane, Operation operation,
                                                std::uint64_t number, const PlanHeader& header,
                                                PlanFault fault, std::int64_t tokens, ErrorRecord* refusal) {
  if (threadIdx.x == 0) {
    const bool rank = fault == PlanFault::rank;
    end_call(lane, number, operation, DeviceError::Why::bad_plan, lane.rank, static_cast<int>(fault),
             rank ? lane.rank : tokens, rank ? header.rank : header.tokens);
    *refusal = ErrorRecord{};
    refusal->kind = ErrorRecord::Kind::usage;
    switch (fault) {
      case PlanFault::configuration:
        set_text(refusal, "plan: made by an exchange of another configuration or placement");
        break;
      case PlanFault::rank:
        set_text(refusal, "plan: made on another rank");
        break;
      case PlanFault::tokens:
        set_text(refusal, "dispatch: another number of tokens than the plan's");
        break;
      case PlanFault::outputs_and_result:
        set_text(refusal, "combine: outputs and result go together");
        break;
      case PlanFault::values:
        set_text(refusal, "combine: row_values and route_values go together");
        break;
      default:
        set_text(refusal, "plan: unfinished or damaged: its header does not agree with itself");
    }
  }
  __syncthreads();
  for (int peer = threadIdx.x / 32; peer < lane.ranks; peer += blockDim.x / 32) {
    if (peer != lane.rank) post_refusal(lane, number, peer, operation, *refusal);
  }
}

// By the whole block, last: each block keeps its own call number, and those of blocks that this launch does
// not have, so that no block ever waits for another to learn the number.
__device__ inline void end_block(const LaneView& lane, std::uint64_t number) {
  __syncthreads();
#pragma unroll 1
  for (unsigned block = blockIdx.x + threadIdx.x * gridDim.x; block < kMaxBlocks;
       block += blockDim.x * gridDim.x)
    lane.state->calls[block] = number;
}

}  // namespace ferry::cuda
