// How one token's row leaves: to all who get it at once, as it is or quantised.
#pragma once

#include "backends/cuda/device/kernel_traits.cuh"
#include "backends/cuda/dispatch/encode.cuh"
#include "backends/cuda/dispatch/row_offsets.cuh"
#include "backends/cuda/dispatch/row_stream.cuh"

namespace ferry::cuda {

// Where a message goes, as the thread knows it that leads it; of other threads all is null.
struct Destination {
  std::byte* message = nullptr;    // in the rank's staging
  LLPacket* notes = nullptr;       // of the message
  std::byte* row = nullptr;        // of part 0: in that message, or where it stays; null: it does not travel
  std::uint64_t* flags = nullptr;  // of the message

  __device__ __forceinline__ static Destination of(const LaneView& lane, int rank, int parity,
                                                   std::int32_t message, std::int32_t bytes) {
    Destination to;
    to.notes = lane.slot_notes(rank, parity, lane.rank, message);
    to.message = lane.message(rank, parity, lane.rank, message, bytes);
    to.flags = lane.dispatch_flags(rank, parity, lane.rank, message);
    return to;
  }

  // Calls store(`mine` of a thread) for each of `threads` (one bit each).
  template <class Store>
  __device__ __forceinline__ static void each(std::uint32_t threads, std::byte* mine, Store store) {
#pragma unroll 1
    for (; threads != 0; threads &= threads - 1) {
      const int thread = __ffs(static_cast<int>(threads)) - 1;
      store(pointer_of(mine, thread));
    }
  }
};

// By one warp: columns of part 0 quantised, values to the `to_row` and scales to the `to_scales` of each
// thread in `rows`. From memory of any kind.
template <DType kType, int kDeep>
__device__ __forceinline__ void send_encoded(const std::byte* row, std::byte* to_row, std::byte* to_scales,
                                             std::uint32_t rows, ByteRange columns, Fp8Options options) {
  const int thread = threadIdx.x % 32;
#pragma unroll 1
  for (int first = columns.begin; first < columns.end; first += kDeep * 256) {
    RawEight raw[kDeep] = {};
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int column = first + 256 * d + 8 * thread;
      if (column < columns.end) raw[d] = load_eight(kType, row, column);
    }
    // One division serves all blocks.
    const float largest = largest_of_block<kType, kDeep>(raw);
    const Fp8Scale mine = fp8_scale(largest, options.power_of_two);
    uint2 values[kDeep];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      float x[8];
      unpack(kType, raw[d], x);
      values[d] = encode_eight(x, __shfl_sync(~0u, mine.factor, 2 * d + thread / 16));
    }
    Destination::each(rows, to_row, [&](std::byte* at) {
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        const int column = first + 256 * d + 8 * thread;
        if (column < columns.end) *reinterpret_cast<uint2*>(at + column) = values[d];
      }
    });
    const int block = first / static_cast<int>(kFp8Block) + thread;
    const bool has = thread < 2 * kDeep && block * kFp8Block < columns.end;
    const std::uint32_t word = scale_word(options, has, mine.scale);
    const bool stores = options.packed ? has && thread % 4 == 0 : has;
    const std::int64_t offset = options.packed ? block : 4 * block;
    Destination::each(rows, to_scales, [&](std::byte* at) {
      if (stores) *reinterpret_cast<std::uint32_t*>(at + offset) = word;
    });
  }
}

// Whether a warp's rows of part 0 come by a stream: whole ones do, what is left of shared ones is soon here.
// The scales of a piece of 32-bit values would not begin at a word.
template <class Traits>
__device__ __forceinline__ bool goes_by_stream(const DispatchArguments& call, int splits) {
  return splits == 0 && (!Traits::quantises(call) || call.type != DType::fp32);
}

// Bytes of a row of part 0 as the caller has it.
template <class Traits>
__device__ __forceinline__ int bytes_to_read(const DispatchArguments& call) {
  return Traits::quantises(call) ? call.lane.hidden * static_cast<int>(value_bytes(call.type))
                                 : static_cast<int>(call.parts.part[0].row_bytes);
}

// Part 0 of any token. Values: what a pointer to the arguments that lies in a struct points to, the compiler
// may take for shared memory.
struct RowsToRead {
  const std::byte* first;
  std::int64_t stride;
  int bytes;

  template <class Traits>
  __device__ __forceinline__ static RowsToRead of(const DispatchArguments& call) {
    return {call.part[0], call.stride[0], bytes_to_read<Traits>(call)};
  }
  __device__ __forceinline__ void open(std::int64_t token, const std::byte** row, ByteRange* range) const {
    *row = first + token * stride;
    *range = {0, bytes};
  }
};

// Those of tokens [token, end), for a stream.
struct TokenParts {
  RowsToRead rows;
  std::int32_t token, end;

  template <class Traits>
  __device__ static TokenParts of(const DispatchArguments& call, int splits, std::int32_t begin,
                                  std::int32_t end) {
    return {RowsToRead::of<Traits>(call), begin, goes_by_stream<Traits>(call, splits) ? end : begin};
  }
  __device__ __forceinline__ bool open(const std::byte** row, ByteRange* range) {
    if (token >= end) return false;
    rows.open(token++, row, range);
    return true;
  }
};

// By one warp: some columns of part 0 of a token, which lie at `row`, quantised, kDeep accesses of 256
// columns at once.
template <int kDeep>
__device__ __forceinline__ void send_encoded_columns(const DispatchArguments& call, const std::byte* row,
                                                     const Destination& to, std::uint32_t rows,
                                                     const ByteRange& columns) {
  std::byte* scales = to.message + call.message.part_offset[1];
  switch (call.type) {
    case DType::bf16:
      return send_encoded<DType::bf16, kDeep>(row, to.row, scales, rows, columns, call.fp8);
    case DType::fp16:
      return send_encoded<DType::fp16, kDeep>(row, to.row, scales, rows, columns, call.fp8);
    case DType::fp32:
      // Not by a stream.
      if constexpr (kDeep == 8)
        send_encoded<DType::fp32, kDeep>(row, to.row, scales, rows, columns, call.fp8);
  }
}

// By one warp: some quarters of parts from `first` on as they are, to each thread in `rows`.
template <class Traits>
__device__ __forceinline__ void send_parts(const DispatchArguments& call, std::int64_t token,
                                           const Destination& to, std::uint32_t rows,
                                           const Quarters& quarters, int first) {
#pragma unroll 1
  for (int p = first; p < call.parts.count; ++p) {
    const ByteRange range = ByteRange::of(quarters, call.parts.part[p].row_bytes, kGranule);
    std::byte* mine = p == 0 ? to.row : to.message + call.message.part_offset[p];
    copy_granules<Traits::kGranulesAtOnce>(
        token_row(call, p, token), range, [&](const auto& granules, int at) {
          Destination::each(rows, mine, [&](std::byte* row) { granules.store(row, at, range.end); });
        });
  }
}

// By one warp: some quarters of a token's row to each thread in `rows`. `stream`: brings part 0, if rows go
// by it.
template <class Traits, class Rows>
__device__ __forceinline__ void send_row(const DispatchArguments& call, std::int64_t token,
                                         const Destination& to, std::uint32_t rows, const Quarters& quarters,
                                         bool streams, RowStream<Rows>& stream) {
  constexpr int kPiece = RowStream<Rows>::kPiece;
  const int bytes = bytes_to_read<Traits>(call);
  if (Traits::quantises(call) && !streams) {
    const ByteRange columns = encoded_columns(call.lane, quarters);
    return send_encoded_columns<8>(call, token_row(call, 0, token), to, rows, columns);
  }
  if (Traits::quantises(call)) {
#pragma unroll 1
    for (int at = 0; at < bytes; at += kPiece) {
      const ByteRange columns{at / 2, min(at + kPiece, bytes) / 2};
      send_encoded_columns<kPiece / 512>(call, stream.take_where() - at, to, rows, columns);
    }
    return;
  }
  if (!streams) return send_parts<Traits>(call, token, to, rows, quarters, 0);
  // A small part beside the first is asked for before that is waited for.
  Granules<1> small;
  const int small_bytes = Traits::kSpecialised && !Traits::kByToken && call.parts.count == 2
                              ? static_cast<int>(call.parts.part[1].row_bytes)
                              : 0;
  const bool has_small = small_bytes > 0 && small_bytes <= kGranule;
  if (has_small) small.load(token_row(call, 1, token), 0, small_bytes);
#pragma unroll 1
  for (int at = 0; at < bytes; at += kPiece) {
    const auto piece = stream.take();
    Destination::each(rows, to.row, [&](std::byte* row) { piece.store(row, at, bytes); });
  }
  if (!has_small) return send_parts<Traits>(call, token, to, rows, quarters, 1);
  Destination::each(rows, to.message + call.message.part_offset[1],
                    [&](std::byte* part) { small.store(part, 0, small_bytes); });
}

}  // namespace ferry::cuda
