// The sending role of combine: this rank's rows, or their sums, go to the home ranks' staging.
#pragma once

#include "cuda/combine.hpp"
#include "cuda/findings.cuh"
#include "cuda/places.cuh"
#include "cuda/route_values.cuh"
#include "cuda/values.cuh"
#include "cuda/wait.cuh"

namespace ferry::cuda {

// The experts' rows of one token on this rank: this thread's slot has row `row` (-1: none), `kept` are the
// slots that have one.
struct TokenRows {
  std::int32_t row;
  std::uint32_t kept;
  float weight;
};

// By one warp. `row`: of this thread's slot, unchecked; `where`: its place in the plan.
__device__ inline TokenRows rows_of_token(const CombineArguments& call, std::int32_t row, std::int64_t total,
                                          std::int64_t where) {
  TokenRows rows{row, 0, 1.0f};
  if (row != -1 && !usable(call.lane, row, total, where)) rows.row = -1;
  rows.kept = __ballot_sync(~0u, rows.row >= 0);
  // Every slot of a rank_major token names its one row.
  if (call.lane.layout == Layout::rank_major) rows.kept &= ~rows.kept + 1;
  if (rows.row >= 0 && call.weights != nullptr) rows.weight = call.weights[rows.row];
  return rows;
}

__device__ __forceinline__ const uint4* output_row(const CombineArguments& call, std::int32_t row) {
  return reinterpret_cast<const uint4*>(call.outputs + row * call.output_stride);
}

// sum = fma(weight, v, sum) over the token's rows, slots ascending, for kDeep accesses of 16 bytes from
// `first`, 32 apart. v is rounded to the wire type.
template <DType kIn, int kDeep>
__device__ __forceinline__ void add_rows(const CombineArguments& call, const TokenRows& rows,
                                         std::int64_t first, std::int64_t end,
                                         float (&sum)[kDeep][kPerAccess<kIn>]) {
  for (std::uint32_t left = rows.kept; left != 0; left &= left - 1) {
    const int slot = __ffs(static_cast<int>(left)) - 1;
    const uint4* from = output_row(call, __shfl_sync(~0u, rows.row, slot));
    const float weight = __shfl_sync(~0u, rows.weight, slot);
    uint4 raw[kDeep];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      if (first + 32 * d < end) raw[d] = from[first + 32 * d];
    }
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      if (first + 32 * d >= end) continue;
      float value[kPerAccess<kIn>];
      unpack<kIn>(raw[d], value);
#pragma unroll
      for (int i = 0; i < kPerAccess<kIn>; ++i) {
        const float v = kIn == call.wire ? value[i] : rounded(call.wire, value[i]);
        sum[d][i] = __fmaf_rn(weight, v, sum[d][i]);
      }
    }
  }
}

// By one warp: the token's sum on this rank, rounded to the wire type, to `to`.
template <DType kIn>
__device__ void send_sum(const CombineArguments& call, const TokenRows& rows, std::byte* to) {
  constexpr int kDeep = 4, kValues = kPerAccess<kIn>;
  const std::int64_t accesses = call.lane.hidden / kValues, thread = threadIdx.x % 32;
  for (std::int64_t base = 0; base < accesses; base += 32 * kDeep) {
    float sum[kDeep][kValues] = {};
    add_rows<kIn, kDeep>(call, rows, base + thread, accesses, sum);
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const std::int64_t at = base + thread + 32 * d;
      if (at < accesses) store_values(call.wire, to, at * kValues, sum[d]);
    }
  }
}

// By one warp: one row in type `type`; moved if it has it.
template <DType kIn>
__device__ void copy_row(const uint4* from, void* to, DType type, std::int64_t hidden) {
  constexpr int kDeep = 4, kValues = kPerAccess<kIn>;
  const std::int64_t accesses = hidden / kValues, thread = threadIdx.x % 32;
  for (std::int64_t base = thread; base < accesses; base += 32 * kDeep) {
    uint4 raw[kDeep];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      if (base + 32 * d < accesses) raw[d] = from[base + 32 * d];
    }
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const std::int64_t at = base + 32 * d;
      if (at >= accesses) continue;
      if (type == kIn) {
        static_cast<uint4*>(to)[at] = raw[d];
        continue;
      }
      float value[kValues];
      unpack<kIn>(raw[d], value);
      store_values(type, to, at * kValues, value);
    }
  }
}

__device__ inline void copy_row(DType in, const uint4* from, void* to, DType type, std::int64_t hidden) {
  switch (in) {
    case DType::bf16:
      return copy_row<DType::bf16>(from, to, type, hidden);
    case DType::fp16:
      return copy_row<DType::fp16>(from, to, type, hidden);
    case DType::fp32:
      return copy_row<DType::fp32>(from, to, type, hidden);
  }
}

__device__ inline void send_sum(const CombineArguments& call, const TokenRows& rows, std::byte* to) {
  switch (call.output_type) {
    case DType::bf16:
      return send_sum<DType::bf16>(call, rows, to);
    case DType::fp16:
      return send_sum<DType::fp16>(call, rows, to);
    case DType::fp32:
      return send_sum<DType::fp32>(call, rows, to);
  }
}

struct CombineSent {
  unsigned long long rows = 0, bytes = 0;

  __device__ void publish(const LaneView& lane) const {
    if (rows == 0) return;
    add_wire(&lane.state->wire.combine_messages, rows);
    add_wire(&lane.state->wire.combine_bytes, bytes);
  }
};

// By one warp: what this rank has for a token at home, as one sum.
__device__ inline void send_token_sum(const CombineArguments& call, std::uint64_t number, int home,
                                      std::int64_t row_at_home, const TokenRows& rows, CombineSent* sent) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32, generation = static_cast<int>(number & 1);
  std::byte* to = lane.combine_row(home, generation, row_at_home);
  jitter(lane);
  if (call.outputs != nullptr) send_sum(call, rows, to);
  if (call.row_values != nullptr && slot < lane.top_k) {
    reinterpret_cast<float*>(to + call.row.tail_offset)[slot] =
        rows.row >= 0 ? call.row_values[rows.row] : 0.0f;
  }
  __syncwarp();
  jitter(lane);
  if (slot != 0) return;
  // Release: the row, by all threads of the warp (ordered by the barrier), before its flag.
  store_release_sys(lane.combine_flag(home, generation, row_at_home), number);
  if (home == lane.rank) return;
  ++sent->rows;
  sent->bytes += (call.outputs != nullptr ? call.row.tail_offset : 0) +
                 (call.row_values != nullptr ? 4 * lane.top_k : 0);
}

// By one warp: what this rank has for a token at home, row for row.
__device__ inline void send_token_rows(const CombineArguments& call, std::uint64_t number, int home,
                                       std::int64_t token, const TokenRows& rows, CombineSent* sent) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32, generation = static_cast<int>(number & 1);
  jitter(lane);
  for (std::uint32_t left = rows.kept; left != 0; left &= left - 1) {
    const int from = __ffs(static_cast<int>(left)) - 1;
    const std::int32_t row = __shfl_sync(~0u, rows.row, from);
    std::byte* to = lane.combine_row(home, generation, token * lane.top_k + from);
    if (call.outputs != nullptr)
      copy_row(call.output_type, output_row(call, row), to, call.wire, lane.hidden);
    if (slot == from) {
      *reinterpret_cast<RouteTail*>(to + call.row.tail_offset) =
          RouteTail{rows.weight, call.row_values != nullptr ? call.row_values[row] : 0.0f};
    }
  }
  __syncwarp();
  jitter(lane);
  // Release: as above; each thread announces its slot's row.
  if (rows.kept >> slot & 1) {
    store_release_sys(lane.combine_flag(home, generation, token * lane.top_k + slot), number);
  }
  if (slot != 0 || home == lane.rank) return;
  const auto count = static_cast<unsigned>(__popc(static_cast<int>(rows.kept)));
  sent->rows += count;
  sent->bytes += count * ((call.outputs != nullptr ? call.row.tail_offset : 0) +
                          static_cast<unsigned long long>(sizeof(RouteTail)));
}

// By one warp: the weight of this thread's slot for message i of `home`, which its home has sent in this
// call. False: the call has ended early.
__device__ inline bool await_weight(const CombineArguments& call, std::uint64_t number, int home,
                                    std::int64_t i, float* weight) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32, generation = static_cast<int>(number & 1);
  const Came came = wait_together(lane, lane.dispatch_flag(lane.rank, generation, home, i),
                                  lane.sent_flag(Phase::weights, lane.rank, generation, home),
                                  {Operation::combine, number, home});
  if (came == Came::ended) return false;
  if (came == Came::no) {
    if (slot == 0) note_bad_source(lane, std::int64_t{home} * lane.max_tokens + i);
    *weight = 0;
    return true;
  }
  const std::byte* values = lane.message(lane.rank, generation, home, i, values_bytes(lane));
  if (slot < lane.top_k) *weight = reinterpret_cast<const float*>(values)[slot];
  return true;
}

// By one warp of `workers`: homes in turn, starting with the next rank.
__device__ inline void send_results(const CombineArguments& call, std::uint64_t number, int worker,
                                    int workers, const PlanView& plan) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32, homes = call.own_staged ? lane.ranks : lane.ranks - 1;
  const std::int64_t total = plan.header->total;
  std::int64_t most = 0;
  for (int home = 0; home < lane.ranks; ++home)
    most = max(most, messages_between(lane, plan, home, lane.rank));
  CombineSent sent;
  for (std::int64_t unit = worker; unit < most * homes; unit += workers) {
    const int home = static_cast<int>((lane.rank + 1 + unit % homes) % lane.ranks);
    const std::int64_t i = unit / homes;
    if (i >= messages_between(lane, plan, home, lane.rank)) continue;
    const std::int64_t message = std::int64_t{home} * lane.max_tokens + i;
    const std::int32_t token = plan.came_token[message], position = plan.came_position[message];
    const std::int32_t row = slot < lane.top_k ? plan.came_rows[message * lane.top_k + slot] : -1;
    const bool good = token >= 0 && token < lane.max_tokens && position >= 0 && position < lane.most_ranks;
    if (!good) {
      if (slot == 0) note_bad_source(lane, message);
      continue;
    }
    TokenRows rows = rows_of_token(call, row, total, message * lane.top_k + slot);
    if (call.weights_travel && !await_weight(call, number, home, i, &rows.weight)) break;
    if (call.reduction == Reduction::partial) {
      send_token_sum(call, number, home, std::int64_t{token} * lane.most_ranks + position, rows, &sent);
    } else {
      send_token_rows(call, number, home, token, rows, &sent);
    }
  }
  if (slot == 0) sent.publish(lane);
}

}  // namespace ferry::cuda
