// Kernels for packed rows (PackedRows): one before they are sent, one after they have been transferred.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/protocol/lane_view.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda {

struct PlaceRowsArguments {
  LaneView lane;
  PlanView plan;
  bool one_row;             // a message returns one row, a sum; otherwise one for each of its slots here
  std::int32_t* first_row;  // [R, T], out: see PackedRows
  std::int32_t* rows;       // [R], out
};

// Finds where the rows for each source rank begin. With a damaged plan it counts the rows that the senders
// send, or none.
void launch_place_rows(const PlaceRowsArguments& arguments, cudaStream_t stream);

// The rows of one rank that have arrived.
struct ArrivedRows {
  const std::byte* rows;
  std::int64_t count;
};

struct FindRowsArguments {
  LaneView lane;
  ArrivedRows from[kMaxDeviceRanks];
  std::int32_t row_bytes, label_offset;
  LLPacket* arrived;  // out: see PackedRows
  std::int64_t most;  // entries of `arrived`
};

// Records in `arrived` where each row has arrived, and sets its flags. Skips rows without a label of this
// call, which their sender has not written.
void launch_find_rows(const FindRowsArguments& arguments, cudaStream_t stream);

void prepare_packed_rows();  // loads the kernels on the current device

}  // namespace ferry::cuda
