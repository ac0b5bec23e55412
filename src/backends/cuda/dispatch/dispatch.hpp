// Dispatch on GPUs: the arguments of its kernels and their launches.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/device/lane_view.hpp"
#include "backends/cuda/dispatch/send_share.hpp"
#include "backends/cuda/host/launch.hpp"
#include "ferry/exchange.hpp"
#include "format/parts.hpp"
#include "layout/device_message.hpp"

namespace ferry::cuda {

// Bytes from the beginning of a block's shared memory to its arrays (block_arrays.cuh).
struct BlockOffsets {
  std::int32_t tables;  // RoutingTables, which are:
  std::int32_t capacity, first_expert, position_of, expert_at, rank_of;
  std::int32_t from_me, here, begin, count, between, offset;  // of Places
  std::int32_t counts;                                        // SendCounts
  std::int32_t streams;                                       // of the warps
};

struct DispatchArguments {
  LaneView lane;
  CallTerms terms;

  // What the caller brings.
  const std::byte* part[kMaxParts];
  std::int64_t stride[kMaxParts];
  std::int64_t tokens;                // N, or its bound
  const std::int32_t* device_tokens;  // N, or null
  DType type;
  const void* ids;
  bool wide_ids;  // int64
  const float* weights;
  PlanView plan;
  bool replay;  // the plan is the caller's, complete; ids are not read
  const void* dot_rows;
  DType dot_type;
  bool apply_weights;

  // How a token travels.
  FormatKind format;
  Fp8Options fp8;
  PartList parts;
  DeviceMessageLayout message;
  bool own_staged;  // this rank's own tokens go through staging as well
  bool own_memory;  // part 0 of the arrivals lies in the lane's memory
  // The number of tokens decides, when the kernel runs, which of the two is in force: `by_token` for fewer
  // than kPlaceFrom; without metadata_blocks it never is.
  DispatchBlocks by_number, by_token;
  SendPartition share;  // of `tokens`: set by the launch
  SendPartition told;   // the same, of the metadata_blocks but the one that coordinates
  BlockOffsets shared;  // set by the launch

  // Where arrivals go.
  std::byte* arrived[kMaxParts];
  std::int64_t leading[kMaxParts];
  float* weight;
  std::int32_t* local_ids;
  std::int32_t* group_of_row;
  float* dots;
  std::int32_t* counts;
  std::int32_t* row_offsets;
};

enum class Phase { fused, send, receive };

// Of a block's shared memory.
std::int64_t dispatch_shared_bytes(const LaneView& lane);

// On the current device, before the first launch for the lane.
void prepare_dispatch(const LaneView& lane);

void launch_dispatch(const DispatchArguments& arguments, Phase phase, const LaunchShape& shape,
                     cudaStream_t stream);

}  // namespace ferry::cuda
