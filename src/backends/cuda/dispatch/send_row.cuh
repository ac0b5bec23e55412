// Sends one token's row to all of its destinations at once, unchanged or quantised.
#pragma once

#include "backends/cuda/dispatch/dispatch_traits.cuh"
#include "backends/cuda/dispatch/routing.cuh"
#include "backends/cuda/dispatch/send_nvfp4.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// Bytes of a row of part 0 in the caller's memory.
template <class Traits>
__device__ __forceinline__ int input_row_bytes(const DispatchArguments& call) {
  return Traits::quantises(call) ? call.lane.hidden * static_cast<int>(value_bytes(call.type))
                                 : static_cast<int>(call.parts.part[0].row_bytes);
}

// Whether a warp loads its rows of part 0 by a stream. Whole rows only: a segment of a row is one batch of
// loads anyway. Not fp32 rows that are quantised: the packed scales of a stream's piece would not be whole
// words. Not rows with a scale of their own that do not fit into two pieces.
template <class Traits>
__device__ __forceinline__ bool uses_stream(const DispatchArguments& call, int log2_segments) {
  if (log2_segments != 0) return false;
  if (!Traits::quantises(call)) return true;
  if (Traits::two_level(call) && call.encoding.row_scale && input_row_bytes<Traits>(call) > 2 * kStreamPiece)
    return false;
  return call.type != DType::fp32;
}

// Part 0 of the caller's rows. It holds copies of the arguments, because the compiler would assume that a
// pointer inside a struct points to shared memory.
struct InputRows {
  const std::byte* first;
  std::int64_t stride;
  int bytes;

  template <class Traits>
  __device__ __forceinline__ static InputRows of(const DispatchArguments& call) {
    return {call.part[0], call.stride[0], input_row_bytes<Traits>(call)};
  }
  __device__ __forceinline__ void open(std::int64_t token, const std::byte** row, ByteRange* range) const {
    *row = first + token * stride;
    *range = {0, bytes};
  }
};

// The rows of tokens [token, end), for a stream.
struct InputRowIterator {
  InputRows rows;
  std::int32_t token, end;

  template <class Traits>
  __device__ static InputRowIterator of(const DispatchArguments& call, int log2_segments, std::int32_t begin,
                                        std::int32_t end) {
    return {InputRows::of<Traits>(call), begin, uses_stream<Traits>(call, log2_segments) ? end : begin};
  }
  __device__ __forceinline__ bool open(const std::byte** row, ByteRange* range) {
    if (token >= end) return false;
    rows.open(token++, row, range);
    return true;
  }
};

// [warp] Threads that `store` store a word at byte `offset` of the `part` of each thread in `rows`.
__device__ __forceinline__ void store_words(std::uint32_t rows, std::byte* part, bool stores,
                                            std::int64_t offset, std::uint32_t word) {
  Destination::for_each(rows, part, [&](std::byte* at) {
    if (stores) *reinterpret_cast<std::uint32_t*>(at + offset) = word;
  });
}

// Where the scales of a token's NVFP4 row are stored.
struct Nvfp4Scales {
  const DispatchArguments& call;
  const Destination& to;
  std::uint32_t rows;

  // [warp] store_words() for the scales of blocks.
  __device__ __forceinline__ void store(bool stores, std::int64_t offset, std::uint32_t word) const {
    store_words(rows, to.message + call.message.part_offset[1], stores, offset, word);
  }
  // [warp] The scale of the whole row.
  __device__ __forceinline__ void store_of_row(float g) const {
    store_words(rows, to.message + call.message.part_offset[2], threadIdx.x % 32 == 0, 0, bits_of(g));
  }
};

// [warp] Quantises some quarters of part 0 of a token to NVFP4 and sends them.
__device__ __forceinline__ void send_nvfp4_row(const DispatchArguments& call, const std::byte* row,
                                               const Destination& to, std::uint32_t rows,
                                               const Quarters& quarters) {
  const Nvfp4Scales scales{call, to, rows};
  send_nvfp4_quarters(
      call, row, {to.row, rows}, quarters,
      [&](bool stores, std::int64_t offset, std::uint32_t word) { scales.store(stores, offset, word); },
      [&](float g) { scales.store_of_row(g); });
}

// [warp] Sends a whole NVFP4 row of `bytes` from `stream`, 16-bit values. Threads read data that other
// threads of the warp have loaded.
template <class Rows>
__device__ __forceinline__ void send_streamed_nvfp4_row(const DispatchArguments& call, const Destination& to,
                                                        std::uint32_t rows, int bytes,
                                                        RowStream<Rows>& stream) {
  constexpr int kPiece = RowStream<Rows>::kPiece;
  const Nvfp4Scales scales{call, to, rows};
  const bool row_scale = call.encoding.row_scale;
  const auto send = [&]<DType kType>() {
    float g = !row_scale && call.global_scale != nullptr ? *call.global_scale : 1.0f;
#pragma unroll 1
    for (int at = 0; at < bytes; at += kPiece) {
      const std::byte* const piece = stream.take_shared();
      if (rows == 0) continue;
      if (row_scale && at == 0) {
        const int columns = min(bytes, kPiece) / 2;
        g = nvfp4_row_scale(largest_finite_of_pieces<kType>(piece, columns, bytes / 2 - columns,
                                                            [&] { return stream.peek_shared(); }));
        scales.store_of_row(g);
      }
      send_nvfp4_columns<kType, 2>(
          call, piece - at, {to.row, rows}, {at / 2, min(at + kPiece, bytes) / 2}, g,
          [&](bool stores, std::int64_t offset, std::uint32_t word) { scales.store(stores, offset, word); });
    }
  };
  if (call.type == DType::bf16) {
    send.template operator()<DType::bf16>();
  } else {
    send.template operator()<DType::fp16>();
  }
}

// [warp] Quantises some columns of part 0 of a token and sends them, kDeep accesses of 256 columns at a time.
// `row`: address of the row's column 0.
template <class Traits, int kDeep>
__device__ __forceinline__ void send_encoded_columns(const DispatchArguments& call, const std::byte* row,
                                                     const Destination& to, std::uint32_t rows,
                                                     const ByteRange& columns) {
  std::byte* scales = to.message + call.message.part_offset[1];
  const auto store_scales = [&](bool stores, std::int64_t offset, std::uint32_t word) {
    store_words(rows, scales, stores, offset, word);
  };
  const EncodedRows to_rows{to.row, rows};
  if (Traits::microscaled(call))
    return send_mx_as<kDeep>(call.type, row, to_rows, columns, call.encoding, store_scales);
  send_encoded_as<kDeep>(call.type, row, to_rows, columns, call.encoding, store_scales);
}

// [warp] Sends some quarters of the parts from `first` on, unchanged, to the destination of each thread in
// `rows`.
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
          Destination::for_each(rows, mine, [&](std::byte* row) { granules.store(row, at, range.end); });
        });
  }
}

// The destination `to` of each thread in `rows` (one bit each).
struct Destinations {
  const Destination& to;
  std::uint32_t rows;
};

// [warp] Sends some quarters of a token's row. `streams`: part 0 comes from `stream`.
template <class Traits, class Rows>
__device__ __forceinline__ void send_row(const DispatchArguments& call, std::int64_t token,
                                         const Destinations& destinations, const Quarters& quarters,
                                         bool streams, RowStream<Rows>& stream) {
  const auto& [to, rows] = destinations;
  constexpr int kPiece = RowStream<Rows>::kPiece;
  const int bytes = input_row_bytes<Traits>(call);
  if (Traits::quantises(call) && !streams) {
    if (Traits::two_level(call)) return send_nvfp4_row(call, token_row(call, 0, token), to, rows, quarters);
    const ByteRange columns = encoded_columns(call.lane, quarters);
    return send_encoded_columns<Traits, 8>(call, token_row(call, 0, token), to, rows, columns);
  }
  if (Traits::two_level(call)) return send_streamed_nvfp4_row(call, to, rows, bytes, stream);
  if (Traits::quantises(call)) {
#pragma unroll 1
    for (int at = 0; at < bytes; at += kPiece) {
      const ByteRange columns{at / 2, min(at + kPiece, bytes) / 2};
      send_encoded_columns<Traits, kPiece / 512>(call, stream.take_address() - at, to, rows, columns);
    }
    return;
  }
  if (!streams) return send_parts<Traits>(call, token, to, rows, quarters, 0);
  // The load of a small second part is issued before the wait for the first.
  Granules<1> small;
  const int small_bytes = Traits::kSpecialised && !Traits::kFewTokens && call.parts.count == 2
                              ? static_cast<int>(call.parts.part[1].row_bytes)
                              : 0;
  const bool has_small = small_bytes > 0 && small_bytes <= kGranule;
  if (has_small) small.load(token_row(call, 1, token), 0, small_bytes);
#pragma unroll 1
  for (int at = 0; at < bytes; at += kPiece) {
    const auto piece = stream.take();
    Destination::for_each(rows, to.row, [&](std::byte* row) { piece.store(row, at, bytes); });
  }
  if (!has_small) return send_parts<Traits>(call, token, to, rows, quarters, 1);
  Destination::for_each(rows, to.message + call.message.part_offset[1],
                        [&](std::byte* part) { small.store(part, 0, small_bytes); });
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
