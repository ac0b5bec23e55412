// Sums that announce themselves, from few tokens: units of a call number and eight bytes of the row.
//
// A flag has to come after the row it stands for, and the fence for that waits until every store has reached
// the other device and word of it is back. A unit needs none. There are twice the bytes, which few tokens do
// not feel.
#pragma once

#include "backends/cuda/combine/row_sums.cuh"
#include "backends/cuda/protocol/wait.cuh"

namespace ferry::cuda {

// Whether the sum for a token goes home in units: `messages` came from its home to the rank that adds up, as
// the plans of both have it. The more ranks send, the sooner the bytes are felt.
__device__ __forceinline__ bool goes_as_packets(const LaneView& lane, std::int32_t messages,
                                                std::int32_t token) {
  return messages * max(lane.ranks - 1, 1) <= kUnitTokens && token < kUnitTokens;
}

// Units of 512 bytes of a row: all threads' first halves of 16 bytes, then all second ones. `row`: of units;
// `at`: in the row they are made of, where its 512 bytes begin.
__device__ __forceinline__ LLPacket* first_unit(std::byte* row, int at) {
  return reinterpret_cast<LLPacket*>(row + 2 * at) + threadIdx.x % 32;
}

// By one warp: this thread's 16 bytes of 512.
__device__ __forceinline__ void store_units(std::byte* row, int at, const uint4& raw, std::uint64_t call) {
  LLPacket* unit = first_unit(row, at);
  store_packet_relaxed_sys(unit, {call, std::uint64_t{raw.y} << 32 | raw.x});
  store_packet_relaxed_sys(unit + 32, {call, std::uint64_t{raw.w} << 32 | raw.z});
}

// The same of computed values, from column `column` of a row of `type`.
template <int kCount>
__device__ void store_value_units(DType type, std::byte* row, int column, const float (&value)[kCount],
                                  std::uint64_t call) {
  const int width = static_cast<int>(value_bytes(type)), each = 8 / width;
  std::uint32_t half[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) half[i] = bits_of(canonical(value[i]));
  if (type != DType::fp32) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i)
      half[i] = type == DType::bf16 ? pack_two<DType::bf16>(value[2 * i], value[2 * i + 1])
                                    : pack_two<DType::fp16>(value[2 * i], value[2 * i + 1]);
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    if (i * each >= kCount) break;
    const int at = column * width + 8 * i;
    auto* unit = reinterpret_cast<LLPacket*>(row + 2 * (at & ~511)) + (at >> 3 & 1) * 32 + (at >> 4 & 31);
    store_packet_relaxed_sys(unit, {call, std::uint64_t{half[2 * i + 1]} << 32 | half[2 * i]});
  }
}

// By one warp: a piece of a row. `first`, `end`: columns of the piece and of the row.
template <DType kType>
__device__ __forceinline__ void store_piece_units(const PackedPiece& piece, std::byte* row, int first,
                                                  int end, std::uint64_t call) {
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    if (PieceColumns<kType>::column(first, d) < end)
      store_units(row, first * static_cast<int>(value_bytes(kType)) + d * kGranule, piece.raw(d), call);
  }
}
template <DType kType>
__device__ __forceinline__ void store_sum_units(DType type, std::byte* row, int first, int end,
                                                const Sums<kType>& sum, std::uint64_t call) {
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    const int column = PieceColumns<kType>::column(first, d);
    if (column < end) store_value_units(type, row, column, sum[d], call);
  }
}

// This thread's units of 512 bytes of a row, as they lie now.
struct LoadedUnits {
  LLPacket low, high;

  // As far as the row has them, if it `wants` them; what is not asked for counts as here.
  __device__ __forceinline__ void load(std::byte* row, int at, int end, std::uint64_t call, bool wants) {
    low = high = {call, 0};
    if (!wants || at + 16 * static_cast<int>(threadIdx.x % 32) >= end) return;
    low = load_packet_relaxed_sys(first_unit(row, at));
    high = load_packet_relaxed_sys(first_unit(row, at) + 32);
  }
  __device__ __forceinline__ bool here(std::uint64_t call) const {
    return low.call >= call && high.call >= call;
  }
  __device__ __forceinline__ uint4 raw() const {
    return make_uint4(static_cast<std::uint32_t>(low.word), static_cast<std::uint32_t>(low.word >> 32),
                      static_cast<std::uint32_t>(high.word), static_cast<std::uint32_t>(high.word >> 32));
  }
};

// By one warp: waits for one of the units of bytes [at, end) of a row that are not here, of each thread's;
// the others come soon after. `all_sent`: the sender's last word.
static __device__ __noinline__ WaitResult wait_for_units(const LaneView& lane, std::byte* row, int at,
                                                         int end, const std::uint64_t* all_sent,
                                                         Awaited awaited) {
  WaitResult came = WaitResult::yes;
  bool waited = false;
  for (int half = 0; at + 16 * static_cast<int>(threadIdx.x % 32) < end && !waited; half ^= 32) {
    const std::uint64_t* word = &first_unit(row, at)[half].call;
    waited = load_relaxed_sys(word) < awaited.call;
    if (waited) came = wait_long(lane, word, all_sent, awaited);
    if (half != 0) at += kGranule;
  }
  if (__any_sync(~0u, came == WaitResult::ended)) return WaitResult::ended;
  return __any_sync(~0u, came == WaitResult::no) ? WaitResult::no : WaitResult::yes;
}

}  // namespace ferry::cuda
