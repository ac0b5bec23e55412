// The home role of combine: a token's rows or sums are added in order, as they arrive.
#pragma once

#include "cuda/combine_send.cuh"

namespace ferry::cuda {

__device__ __forceinline__ std::byte* result_row(const CombineArguments& call, std::int64_t row) {
  return call.result + row * call.result_stride;
}

// By every thread of a warp, each for an entry of its own (`awaits`: it has one): waits for a row of staging.
// False for the entry: nothing came, which only a damaged plan makes happen. `ended`: the call, early.
__device__ inline bool await_row(const CombineArguments& call, std::uint64_t number, bool awaits, int from,
                                 std::int64_t row, bool* ended) {
  const LaneView& lane = call.lane;
  const int generation = static_cast<int>(number & 1);
  Came came = Came::no;
  if (awaits) {
    came = wait_for(lane, lane.combine_flag(lane.rank, generation, row),
                    lane.sent_flag(Phase::rows, lane.rank, generation, from),
                    {Operation::combine, number, from});
    if (came == Came::no) note_bad_source(lane, row);
  }
  // Also: each thread's acquire before all threads' reads of its row.
  *ended = __any_sync(~0u, came == Came::ended);
  __syncwarp();
  return came == Came::yes;
}

// Adds the sums of the ranks in `present`, ascending positions; `own` is the position whose sum is made here.
template <DType kWire>
__device__ void add_sums(const CombineArguments& call, std::uint64_t number, std::int64_t token,
                         std::uint32_t present, int own, const TokenRows& own_rows) {
  constexpr int kDeep = 4, kValues = kPerAccess<kWire>;
  const LaneView& lane = call.lane;
  const std::int64_t accesses = lane.hidden / kValues, thread = threadIdx.x % 32;
  const int generation = static_cast<int>(number & 1);
  for (std::int64_t base = 0; base < accesses; base += 32 * kDeep) {
    const std::int64_t first = base + thread;
    float sum[kDeep][kValues] = {};
    for (std::uint32_t left = present; left != 0; left &= left - 1) {
      const int position = __ffs(static_cast<int>(left)) - 1;
      if (position == own) {
        float mine[kDeep][kValues] = {};
        add_rows<kWire, kDeep>(call, own_rows, first, accesses, mine);
#pragma unroll
        for (int d = 0; d < kDeep; ++d) {
#pragma unroll
          for (int i = 0; i < kValues; ++i) sum[d][i] = __fadd_rn(sum[d][i], rounded(kWire, mine[d][i]));
        }
        continue;
      }
      const auto* from = reinterpret_cast<const uint4*>(
          lane.combine_row(lane.rank, generation, token * lane.most_ranks + position));
      uint4 raw[kDeep];
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        if (first + 32 * d < accesses) raw[d] = from[first + 32 * d];
      }
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        if (first + 32 * d >= accesses) continue;
        float value[kValues];
        unpack<kWire>(raw[d], value);
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum[d][i] = __fadd_rn(sum[d][i], value[i]);
      }
    }
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const std::int64_t at = first + 32 * d;
      if (at < accesses) store_values(call.result_type, result_row(call, token), at * kValues, sum[d]);
    }
  }
}

// By one warp: y of a token from the ranks' sums. False: the call has ended early.
__device__ inline bool reduce_sums(const CombineArguments& call, std::uint64_t number, std::int64_t token,
                                   const PlanView& plan) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32;
  const std::int64_t entry = token * lane.most_ranks + slot, route = token * lane.top_k + slot;
  std::int32_t rank = slot < lane.most_ranks ? plan.token_ranks[entry] : -1;
  const std::uint32_t ends = __ballot_sync(~0u, rank == -1);
  if (ends != 0 && slot > __ffs(static_cast<int>(ends)) - 1) rank = -1;
  if (rank != -1 && !usable(lane, rank, lane.ranks, entry)) rank = -1;
  const bool here = rank == lane.rank && !call.own_staged;
  bool ended = false;
  const bool came = await_row(call, number, rank >= 0 && !here, rank, entry, &ended);
  if (ended) return false;

  const std::uint32_t own = __ballot_sync(~0u, here);
  TokenRows own_rows{-1, 0, 1.0f};
  if (own != 0) {
    const std::int32_t destination = slot < lane.top_k ? plan.route_rank[route] : -1;
    const bool mine = destination == lane.rank;
    if (destination != -1) usable(lane, destination, lane.ranks, route);
    own_rows = rows_of_token(call, mine ? plan.route_row[route] : -1, plan.header->total, route);
    if (mine && call.weights_travel) own_rows.weight = call.home_weights[route];
  }
  const std::uint32_t present = __ballot_sync(~0u, came || here);
  const int own_position = own != 0 ? __ffs(static_cast<int>(own)) - 1 : -1;
  if (call.result != nullptr) {
    switch (call.wire) {
      case DType::bf16:
        add_sums<DType::bf16>(call, number, token, present, own_position, own_rows);
        break;
      case DType::fp16:
        add_sums<DType::fp16>(call, number, token, present, own_position, own_rows);
        break;
      case DType::fp32:
        add_sums<DType::fp32>(call, number, token, present, own_position, own_rows);
        break;
    }
  }
  if (call.route_values == nullptr) return true;
  const int generation = static_cast<int>(number & 1);
  for (int k = 0; k < lane.top_k; ++k) {
    // The rank of slot k, and where it stands among the token's ranks.
    const std::int32_t destination = plan.route_rank[token * lane.top_k + k];
    const std::int32_t row = plan.route_row[token * lane.top_k + k];
    const int position = __ffs(static_cast<int>(__ballot_sync(~0u, rank >= 0 && rank == destination))) - 1;
    if (slot != 0) continue;
    float value = 0;
    if (row != -1 && position < 0) {
      note_bad_source(lane, token * lane.top_k + k);
    } else if (row != -1 && position == own_position) {
      if (usable(lane, row, plan.header->total, token * lane.top_k + k)) value = call.row_values[row];
    } else if (row != -1 && (present >> position & 1) != 0) {
      const std::byte* sum = lane.combine_row(lane.rank, generation, token * lane.most_ranks + position);
      value = reinterpret_cast<const float*>(sum + call.row.tail_offset)[k];
    }
    call.route_values[token * lane.top_k + k] = value;
  }
  return true;
}

// Where a route's row lies when all rows are home.
struct RowAtHome {
  const uint4* row;  // null: none
  float weight;
};

// y = sum over slots ascending of fma(weight, v, y).
template <DType kWire>
__device__ void add_routes(const CombineArguments& call, std::int64_t token, const RowAtHome& mine,
                           std::uint32_t present) {
  constexpr int kDeep = 4, kValues = kPerAccess<kWire>;
  const std::int64_t accesses = call.lane.hidden / kValues, thread = threadIdx.x % 32;
  for (std::int64_t base = 0; base < accesses; base += 32 * kDeep) {
    const std::int64_t first = base + thread;
    float sum[kDeep][kValues] = {};
    for (std::uint32_t left = present; left != 0; left &= left - 1) {
      const int slot = __ffs(static_cast<int>(left)) - 1;
      const auto* from = reinterpret_cast<const uint4*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine.row), slot));
      const float weight = __shfl_sync(~0u, mine.weight, slot);
      uint4 raw[kDeep];
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        if (first + 32 * d < accesses) raw[d] = from[first + 32 * d];
      }
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        if (first + 32 * d >= accesses) continue;
        float value[kValues];
        unpack<kWire>(raw[d], value);
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum[d][i] = __fmaf_rn(weight, value[i], sum[d][i]);
      }
    }
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const std::int64_t at = first + 32 * d;
      if (at < accesses) store_values(call.result_type, result_row(call, token), at * kValues, sum[d]);
    }
  }
}

// By one warp: the rows of a token stay apart, in the result's type.
__device__ inline void copy_routes(const CombineArguments& call, std::int64_t token, const RowAtHome& mine,
                                   std::uint32_t present) {
  const LaneView& lane = call.lane;
  for (int slot = 0; slot < lane.top_k; ++slot) {
    const auto* from = reinterpret_cast<const uint4*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine.row), slot));
    std::byte* to = result_row(call, token * lane.top_k + slot);
    if ((present >> slot & 1) != 0) {
      copy_row(call.wire, from, to, call.result_type, lane.hidden);
      continue;
    }
    const std::int64_t bytes = lane.hidden * value_bytes(call.result_type);
    for (std::int64_t at = 16 * (threadIdx.x % 32); at < bytes; at += 512)
      *reinterpret_cast<uint4*>(to + at) = make_uint4(0, 0, 0, 0);
  }
}

// By one warp: exact and unreduced. False: the call has ended early.
__device__ inline bool reduce_routes(const CombineArguments& call, std::uint64_t number, std::int64_t token,
                                     const PlanView& plan) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32, generation = static_cast<int>(number & 1);
  const std::int64_t route = token * lane.top_k + slot;
  std::int32_t row = slot < lane.top_k ? plan.route_row[route] : -1;
  int rank = row != -1 ? plan.route_rank[route] : -1;
  if (row != -1 && !usable(lane, rank, lane.ranks, route)) row = -1;
  const bool here = row != -1 && rank == lane.rank && !call.own_staged;
  if (here && !usable(lane, row, plan.header->total, route)) row = -1;
  bool ended = false;
  const bool came = await_row(call, number, row != -1 && !here, rank, route, &ended);
  if (ended) return false;

  RowAtHome mine{nullptr, 1.0f};
  float value = 0;
  if (here && row != -1) {
    mine.row = output_row(call, row);
    if (call.weights != nullptr) mine.weight = call.weights[row];
    if (call.row_values != nullptr) value = call.row_values[row];
  } else if (came) {
    const std::byte* staged = lane.combine_row(lane.rank, generation, route);
    const RouteTail tail = *reinterpret_cast<const RouteTail*>(staged + call.row.tail_offset);
    mine = {reinterpret_cast<const uint4*>(staged), tail.weight};
    value = tail.value;
  }
  if (slot < lane.top_k && call.home_weights != nullptr) mine.weight = call.home_weights[route];
  if (slot < lane.top_k && call.route_values != nullptr) call.route_values[route] = value;
  const std::uint32_t present = __ballot_sync(~0u, mine.row != nullptr || (here && row != -1));
  if (call.result == nullptr) return true;
  if (call.reduction == Reduction::unreduced) {
    copy_routes(call, token, mine, present);
    return true;
  }
  switch (call.wire) {
    case DType::bf16:
      add_routes<DType::bf16>(call, token, mine, present);
      break;
    case DType::fp16:
      add_routes<DType::fp16>(call, token, mine, present);
      break;
    case DType::fp32:
      add_routes<DType::fp32>(call, token, mine, present);
      break;
  }
  return true;
}

// By one warp of `workers`.
__device__ inline void bring_home(const CombineArguments& call, std::uint64_t number, int worker, int workers,
                                  const PlanView& plan) {
  const std::int64_t tokens = plan.header->tokens;
  for (std::int64_t token = worker; token < tokens; token += workers) {
    const bool goes_on = call.reduction == Reduction::partial ? reduce_sums(call, number, token, plan)
                                                              : reduce_routes(call, number, token, plan);
    if (!goes_on) return;
  }
}

}  // namespace ferry::cuda
