// One fp32 a route, from a token's home to its rows: in the staging that messages of dispatch use.
#pragma once

#include "cuda/findings.cuh"
#include "cuda/places.cuh"
#include "cuda/wait.cuh"

namespace ferry::cuda {

__device__ inline std::int64_t values_bytes(const LaneView& lane) {
  return (4 * lane.top_k + 15) / 16 * 16;
}

// By one warp of `workers`: the K values of each token to every rank that has rows of it.
__device__ inline void send_values(const LaneView& lane, std::uint64_t number, const float* values,
                                   int worker, int workers, const PlanView& plan) {
  const int slot = threadIdx.x % 32, generation = static_cast<int>(number & 1);
  std::int64_t most = 0;
  for (int rank = 0; rank < lane.ranks; ++rank)
    most = max(most, messages_between(lane, plan, lane.rank, rank));
  for (std::int64_t unit = worker; unit < most * lane.ranks; unit += workers) {
    const int rank = static_cast<int>((lane.rank + 1 + unit) % lane.ranks);
    const std::int64_t i = unit / lane.ranks;
    if (i >= messages_between(lane, plan, lane.rank, rank)) continue;
    const std::int64_t where = std::int64_t{rank} * lane.max_tokens + i;
    const std::int32_t token = plan.sent_tokens[where];
    disturb(lane, Point::values);
    if (token < 0 || token >= plan.header->tokens) {
      if (slot == 0) note_bad_source(lane, where);
      continue;
    }
    auto* to = reinterpret_cast<float*>(lane.message(rank, generation, lane.rank, i, values_bytes(lane)));
    if (slot < lane.top_k) to[slot] = values[std::int64_t{token} * lane.top_k + slot];
    __syncwarp();
    // Release: the values of all threads of the warp (ordered by the barrier) before their flag.
    if (slot == 0) store_release_sys(lane.dispatch_flags(rank, generation, lane.rank, i), number);
  }
}

}  // namespace ferry::cuda
