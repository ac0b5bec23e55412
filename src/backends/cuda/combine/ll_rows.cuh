// LL rows: combine's sums of few tokens, sent as LL packets of a call number and eight bytes of the row.
//
// A flag must come after the row it announces, and the fence for that waits for a round trip to the other
// device. LL packets need no fence. They double the bytes, which costs less than the fence when tokens are
// few.
#pragma once

#include "backends/cuda/combine/row_sums.cuh"
#include "backends/cuda/protocol/wait.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// Whether the sum for a token returns to its source rank as LL packets. `messages`: from the source rank to
// the summing rank; the plans of both know it. The limit falls with the number of ranks, because their
// doubled bytes share a link.
__device__ __forceinline__ bool returns_as_packets(const LaneView& lane, std::int32_t messages,
                                                   std::int32_t token) {
  return messages * max(lane.ranks - 1, 1) <= kLLTokens && token < kLLTokens;
}

// This thread's first packet for 512 bytes of a row; its second is 32 packets further. Packets of the first
// eight of each thread's 16 bytes come first, then those of the second eight. `row`: of packets; `at`: offset
// of the 512 bytes in the row they encode.
__device__ __forceinline__ LLPacket* first_packet(std::byte* row, int at) {
  return reinterpret_cast<LLPacket*>(row + 2 * at) + threadIdx.x % 32;
}

// [warp] Stores 512 bytes, 16 a thread.
__device__ __forceinline__ void store_packets(std::byte* row, int at, const uint4& raw, std::uint64_t call) {
  LLPacket* packet = first_packet(row, at);
  store_packet_relaxed_sys(packet, {call, std::uint64_t{raw.y} << 32 | raw.x});
  store_packet_relaxed_sys(packet + 32, {call, std::uint64_t{raw.w} << 32 | raw.z});
}

// [thread] Stores kCount computed values of a row of `type`, from column `column` on.
template <int kCount>
__device__ void store_value_packets(DType type, std::byte* row, int column, const float (&value)[kCount],
                                    std::uint64_t call) {
  const int width = static_cast<int>(value_bytes(type)), each = 8 / width;
  std::uint32_t word[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) word[i] = bits_of(canonical(value[i]));
  if (type != DType::fp32) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i)
      word[i] = type == DType::bf16 ? pack_two<DType::bf16>(value[2 * i], value[2 * i + 1])
                                    : pack_two<DType::fp16>(value[2 * i], value[2 * i + 1]);
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    if (i * each >= kCount) break;
    const int at = column * width + 8 * i;
    auto* packet = reinterpret_cast<LLPacket*>(row + 2 * (at & ~511)) + (at >> 3 & 1) * 32 + (at >> 4 & 31);
    store_packet_relaxed_sys(packet, {call, std::uint64_t{word[2 * i + 1]} << 32 | word[2 * i]});
  }
}

// [warp] Stores a piece of a row. `first`: its first column; `end`: the row's columns.
template <DType kType>
__device__ __forceinline__ void store_piece_packets(const PackedPiece& piece, std::byte* row, int first,
                                                    int end, std::uint64_t call) {
#pragma unroll
  for (int d = 0; d < kPieceAccesses; ++d) {
    if (PieceColumns<kType>::column(first, d) < end)
      store_packets(row, first * static_cast<int>(value_bytes(kType)) + d * kGranule, piece.raw(d), call);
  }
}
// [warp] Stores packets of sums, rounded to `type`.
template <DType kType>
__device__ __forceinline__ void store_sum_packets(DType type, std::byte* row, int first, int end,
                                                  const PieceSums<kType>& sum, std::uint64_t call) {
#pragma unroll
  for (int d = 0; d < kPieceAccesses; ++d) {
    const int column = PieceColumns<kType>::column(first, d);
    if (column < end) store_value_packets(type, row, column, sum[d], call);
  }
}

// This thread's packets for 512 bytes of a row, loaded once, ready or not.
struct LoadedPackets {
  LLPacket low, high;

  // Loads the packets if the thread `wants` them and the row is that long. Packets that are not loaded count
  // as ready.
  __device__ __forceinline__ void load(std::byte* row, int at, int end, std::uint64_t call, bool wants) {
    low = high = {call, 0};
    if (!wants || at + 16 * static_cast<int>(threadIdx.x % 32) >= end) return;
    low = load_packet_relaxed_sys(first_packet(row, at));
    high = load_packet_relaxed_sys(first_packet(row, at) + 32);
  }
  __device__ __forceinline__ bool here(std::uint64_t call) const {
    return low.call >= call && high.call >= call;
  }
  __device__ __forceinline__ uint4 raw() const {
    return make_uint4(static_cast<std::uint32_t>(low.word), static_cast<std::uint32_t>(low.word >> 32),
                      static_cast<std::uint32_t>(high.word), static_cast<std::uint32_t>(high.word >> 32));
  }
};

// [warp] Each thread waits for its first packet of bytes [at, end) of a row that is not ready; the others
// will follow soon, and the caller looks again. `end_of_stream`: the sender's flag. Returns
// WaitResult::end_of_data if some packet never comes.
static __device__ __noinline__ WaitResult wait_for_ll_row(const LaneView& lane, std::byte* row, int at,
                                                          int end, const Flag* end_of_stream,
                                                          WaitTarget awaited) {
  WaitResult result = WaitResult::ready;
  bool waited = false;
  for (int half = 0; at + 16 * static_cast<int>(threadIdx.x % 32) < end && !waited; half ^= 32) {
    const LLPacket* packet = first_packet(row, at) + half;
    waited = load_packet_relaxed_sys(packet).call < awaited.call;
    if (waited) result = wait_long(lane, packet, end_of_stream, awaited);
    if (half != 0) at += kGranule;
  }
  if (__any_sync(~0u, result == WaitResult::aborted)) return WaitResult::aborted;
  return __any_sync(~0u, result == WaitResult::end_of_data) ? WaitResult::end_of_data : WaitResult::ready;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
