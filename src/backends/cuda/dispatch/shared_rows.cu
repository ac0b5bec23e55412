// Shared experts in dispatch: each warp takes a token, or a quarter of its row, and writes it to the token's
// row in every shared group.
#include "backends/cuda/dispatch/shared_rows.hpp"

#include <algorithm>

#include "backends/cuda/dispatch/block_state.cuh"
#include "backends/cuda/dispatch/encode_with_scale.cuh"
#include "backends/cuda/dispatch/shared_positions.cuh"

namespace ferry::cuda {
namespace {

constexpr int kThreads = 512;

// The rows of one token: thread s has its row in the group of shared expert s, or -1.
struct TokenSharedRows {
  std::int32_t token, row;
  std::uint32_t threads;  // that have a row, one bit each
};

// [warp] Calls store(row) with the `row` of each thread in `threads`.
template <class Row, class Store>
__device__ __forceinline__ void for_each_row(std::uint32_t threads, Row row, Store store) {
#pragma unroll 1
  for (std::uint32_t left = threads; left != 0; left &= left - 1)
    store(std::int64_t{__shfl_sync(~0u, row, __ffs(static_cast<int>(left)) - 1)});
}

// [warp] Calls store(row) for each row of the token.
template <class Store>
__device__ __forceinline__ void for_each_row(const TokenSharedRows& of, Store store) {
  for_each_row(of.threads, of.row, store);
}

// [warp] Each thread writes the metadata of its row.
__device__ __forceinline__ void write_shared_metadata(const DispatchArguments& call,
                                                      const TokenSharedRows& of) {
  const auto shared = static_cast<int>(threadIdx.x % 32);
  if (of.row < 0) return;
  // A plan has its sources already.
  if (!call.by_plan) call.plan.sources[of.row] = {call.lane.rank, of.token, call.lane.top_k + shared};
  if (call.weight != nullptr) call.weight[of.row] = 1;
  if (call.dots != nullptr) call.dots[of.row] = 0;
  if (call.group_of_row != nullptr) call.group_of_row[of.row] = shared;
}

// [warp] Quantises some columns of the token's row.
__device__ __forceinline__ void write_encoded(const DispatchArguments& call, const TokenSharedRows& of,
                                              const Quarters& quarters) {
  const PartLayout &values = call.parts.part[0], &scales = call.parts.part[1];
  std::byte* const mine = call.received_parts[0] + of.row * values.row_bytes;
  const std::int64_t leading = call.leading_dimension[1],
                     scale_row = column_row(scales, of.row, call.group_rows, leading);
  const auto store_scales = [&](bool stores, std::int64_t offset, std::uint32_t word) {
    for_each_row(of.threads, scale_row, [&](std::int64_t row) {
      const std::int64_t element = offset / scales.element_bytes;
      std::byte* const to = call.received_parts[1] + element_offset(scales, row, element, leading) +
                            offset % scales.element_bytes;
      if (stores) *reinterpret_cast<std::uint32_t*>(to) = word;
    });
  };
  const std::byte* const from = token_row(call, 0, of.token);
  if (call.encoding.is_two_level())
    return send_nvfp4_quarters(call, from, mine, of.threads, quarters, store_scales, [&](float g) {
      for_each_row(of, [&](std::int64_t row) {
        if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(call.received_parts[2])[row] = g;
      });
    });
  const ByteRange columns = encoded_columns(call.lane, quarters);
  if (call.encoding.is_mx())
    return send_mx_as<8>(call.type, from, mine, of.threads, columns, call.encoding, store_scales);
  send_encoded_as<8>(call.type, from, mine, of.threads, columns, call.encoding, store_scales);
}

// [warp] Copies a slice of the token's row.
__device__ __forceinline__ void write_copies(const DispatchArguments& call, const TokenSharedRows& of,
                                             const Quarters& quarters) {
  for (int p = 0; p < call.parts.count; ++p) {
    const std::int64_t bytes = call.parts.part[p].row_bytes;
    const ByteRange range = ByteRange::of(quarters, bytes, kGranule);
    copy_granules<GenericDispatch::kGranulesAtOnce>(
        token_row(call, p, of.token), range, [&](const auto& granules, int at) {
          for_each_row(of, [&](std::int64_t row) {
            granules.store(call.received_parts[p] + row * bytes, at, range.end);
          });
        });
  }
}

__device__ __forceinline__ void write_token(const DispatchArguments& call, const TokenSharedRows& of,
                                            const Quarters& quarters) {
  if (of.threads == 0) return;
  if (quarters.first == 0) write_shared_metadata(call, of);
  if (call.input_scales != nullptr) {
    // As below. Each expert has a scale of its own.
    for (std::uint32_t left = quarters.first == 0 ? of.threads : 0; left != 0; left &= left - 1) {
      const int shared = __ffs(static_cast<int>(left)) - 1;
      encode_with_scale(call, token_row(call, 0, of.token), __shfl_sync(~0u, of.row, shared),
                        call.input_scales[call.lane.experts + shared]);
    }
  } else if (call.apply_weights) {
    // Rows that are computed stay whole.
    if (quarters.first == 0)
      for_each_row(of, [&](std::int64_t row) {
        compute_row(call, token_row(call, 0, of.token), static_cast<std::int32_t>(row), 1.0f);
      });
  } else if (call.encoding.quantises()) {
    write_encoded(call, of, quarters);
  } else {
    write_copies(call, of, quarters);
  }
}

// `call` has no dot_rows: the dot products of shared rows are 0.
__global__ void __launch_bounds__(kThreads)
    shared_rows_kernel(const __grid_constant__ DispatchArguments call) {
  const LaneView& lane = call.lane;
  std::int64_t tokens, rows = lane.capacity_rows;
  if (call.by_plan) {
    // Dispatch refuses a plan that cannot be used.
    if (check_plan(lane, *call.plan.header, -1) != PlanFault::none) return;
    tokens = call.plan.header->tokens;
    rows = call.plan.header->total;  // that the caller has memory for
    // The caller may have fewer tokens than the plan; dispatch refuses that too.
    if (tokens > call.tokens) return;
  } else {
    tokens = token_count(call, false);
  }
  const SharedRows shared = shared_rows_of(lane, static_cast<std::int32_t>(tokens));
  const auto expert = static_cast<int>(threadIdx.x % 32);
  RowSlices::of(shared.count).for_each([&](std::int64_t index, const Quarters& quarters) {
    TokenSharedRows of{static_cast<std::int32_t>(shared.first + index), -1, 0};
    if (expert < lane.shared_experts) {
      const std::int64_t row = shared.row(expert, of.token);
      if (row < rows) of.row = static_cast<std::int32_t>(row);
    }
    of.threads = __ballot_sync(~0u, of.row >= 0);
    write_token(call, of, quarters);
  });
}

}  // namespace

void prepare_shared_rows() {
  load_kernels(&shared_rows_kernel);
}

void launch_shared_rows(const DispatchArguments& arguments, int blocks, cudaStream_t stream) {
  DispatchArguments call = arguments;
  call.dot_rows = nullptr;
  const std::int64_t slices = kQuarters * std::max<std::int64_t>(call.tokens, 1), warps = kThreads / 32;
  const auto needed = static_cast<int>(std::min<std::int64_t>((slices + warps - 1) / warps, blocks));
  launch(&shared_rows_kernel, call, kThreads, needed, stream, "launch the copy of shared rows");
}

}  // namespace ferry::cuda
