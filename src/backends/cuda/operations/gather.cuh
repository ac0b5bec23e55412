// all_gather_v and reduce_scatter_v, as one block executes them.
//
// A rank's rows are one block of bytes for each receiver. Every rank stores its blocks in the receivers'
// dispatch staging, and the receivers copy or add them up from there.
//
// The call header carries the counts, so the first round has the number of the call. Blocks larger than the
// staging of a pair take further rounds, with call numbers of their own, in the same launch.
//
// Round n + 2 may overwrite the staging of round n, because
// 1. it follows the end-of-stream flags of round n + 1 from all ranks, and
// 2. a rank sets those after all of its blocks have sent round n + 1, and so after they have read round n.
// For the same reason the header of a later call overwrites none that a rank has yet to read.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/operations/small_operations.hpp"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kGatherThreads = 512;
inline constexpr int kGatherWarps = kGatherThreads / 32;
inline constexpr std::int64_t kGatherChunk = 4096;  // bytes that a warp moves at once
static_assert(kGatherThreads >= kMaxDeviceRanks);   // a thread of a block for each rank

// In shared memory: one block's view of the call.
struct GatherState {
  CallHeader header;
  std::uint64_t number;               // of the current round
  std::int32_t count;                 // rows of this rank
  std::int64_t begin;                 // byte of every block at which the current round begins
  std::int32_t rows[kKernelRanks];    // of each rank
  std::int64_t bytes[kKernelRanks];   // of each rank's block: its rows
  std::int64_t offset[kKernelRanks];  // of that block among those of the sub-group
  std::int64_t largest;               // block of any rank
};

// [warp] Copies whole `T`s, and the rest byte by byte.
template <class T>
__device__ __forceinline__ void copy_as(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const auto thread = static_cast<std::int64_t>(threadIdx.x % 32), words = bytes / std::int64_t{sizeof(T)};
#pragma unroll 4
  for (std::int64_t i = thread; i < words; i += 32)
    reinterpret_cast<T*>(to)[i] = reinterpret_cast<const T*>(from)[i];
  for (std::int64_t i = words * std::int64_t{sizeof(T)} + thread; i < bytes; i += 32) to[i] = from[i];
}

// [warp] Copies bytes. Rows have any size, so they may begin at any address.
__device__ __forceinline__ void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const auto both = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  if (both % 16 == 0) return copy_as<uint4>(to, from, bytes);
  if (both % 4 == 0) return copy_as<std::uint32_t>(to, from, bytes);
  copy_as<std::byte>(to, from, bytes);
}

class GatherBlock {
 public:
  __device__ GatherBlock(const GatherArguments& call, GatherState* state)
      : call_(call), lane_(call.lane), state_(*state) {}

  // [block] Reads the count and posts the header of the call. Returns false if the exchange has failed.
  __device__ bool start() {
    bool go = false;
    if (threadIdx.x == 0) {
      go = !is_aborted(lane_, kExchangeFailed);
      state_.number = lane_.state->calls[blockIdx.x] + 1;
      state_.begin = 0;
      state_.count = read_count();
      state_.header.terms = call_.terms;
      set_epoch(*lane_.epoch, &state_.header);
      state_.header.facts = make_header_facts(operation(), state_.count);
    }
    if (__syncthreads_or(go) == 0) return false;
    if (blockIdx.x == 0 && threadIdx.x < 32) {
      post_header(lane_, state_.number, state_.header);
      // Every header has room for two words of counts.
      if (threadIdx.x < 2) {
        post_header_word(lane_, state_.number, kHeaderCounts + static_cast<int>(threadIdx.x),
                         static_cast<std::uint64_t>(threadIdx.x == 0 ? call_.held : call_.place));
      }
    }
    return true;
  }

  // [block] Receives the counts of all ranks, and checks that there is room and that rows which lie in memory
  // of the result lie at their own place. Returns false if the call is aborted.
  __device__ bool await_counts(bool exact) {
    bool go = false;
    if (threadIdx.x < 32) {
      go = await_all_headers_wide(
          lane_, state_.number, state_.header, blockIdx.x == 0,
          [&](int rank, const HeaderFacts& theirs) { state_.rows[rank] = theirs.count; });
      __syncwarp();
      go = go && place_blocks(exact);
    }
    return __syncthreads_or(go) != 0;
  }

  __device__ bool in_round() const { return state_.begin < state_.largest; }
  __device__ std::int64_t begin() const { return state_.begin; }

  // The bytes of a block that belong to the current round.
  __device__ std::int64_t bytes_of_round(std::int64_t block_bytes) const {
    return ::max(std::int64_t{0}, ::min(block_bytes - state_.begin, lane_.exchange.source));
  }
  __device__ std::int64_t bytes_in_round(int rank) const { return bytes_of_round(state_.bytes[rank]); }
  __device__ std::int64_t most_in_round() const { return bytes_of_round(state_.largest); }
  __device__ std::int64_t offset(int rank) const { return state_.offset[rank]; }

  // [block] Stores the current round of a block for each other member in the member's staging, and sets its
  // flag. `block_of(peer, &bytes)` returns this rank's block for the peer and the bytes of this round, at
  // most `most`.
  template <class BlockOf>
  __device__ void send(std::int64_t most, BlockOf block_of) {
    const int parity = static_cast<int>(state_.number & 1);
    inject_fault(lane_, KernelPoint::row);
    for_each_chunk(most, [&](int peer, std::int64_t at) {
      if (peer == lane_.rank) return;
      std::int64_t bytes = 0;
      const std::byte* const from = block_of(peer, &bytes);
      if (at >= bytes) return;
      copy_bytes(memory::message(lane_, peer, parity, lane_.rank, 0, 0) + at, from + state_.begin + at,
                 ::min(kGatherChunk, bytes - at));
    });
    __syncthreads();
    if (threadIdx.x == 0) publish_end_of_stream(lane_, state_.number, static_cast<int>(gridDim.x));
  }

  // [block] Waits until every rank, member or not, has sent the current round, and this rank's other blocks
  // have too: the end-of-stream flag counts the blocks of one round. Returns false if the call is aborted.
  __device__ bool await_blocks() {
    const int peer = static_cast<int>(threadIdx.x), parity = static_cast<int>(state_.number & 1);
    bool arrived = true;
    if (peer < lane_.ranks) {
      arrived = wait_flag(lane_, memory::end_of_stream_flag(lane_, Payload::rows, lane_.rank, parity, peer),
                          nullptr, {operation(), state_.number, peer}) == WaitResult::ready;
    }
    // Orders the data behind the flags before the reads of the whole block.
    return __syncthreads_and(arrived) != 0;
  }

  // The current round of the block that `source` has sent to this rank.
  __device__ const std::byte* received(int source) const {
    return memory::message(lane_, lane_.rank, static_cast<int>(state_.number & 1), source, 0, 0);
  }

  // [block] Calls work(member, at) for every chunk of `most` bytes and every member; each warp of the launch
  // gets chunks of its own.
  template <class Work>
  __device__ void for_each_chunk(std::int64_t most, Work work) const {
    const std::int64_t chunks = (most + kGatherChunk - 1) / kGatherChunk * call_.members;
    const std::int64_t warps = std::int64_t{kGatherWarps} * gridDim.x;
    // Chunks are dealt out to the blocks in turn, so that a small call uses many of them.
    for (std::int64_t i = blockIdx.x + std::int64_t{gridDim.x} * (threadIdx.x / 32); i < chunks; i += warps)
      work(call_.first + static_cast<int>(i % call_.members), i / call_.members * kGatherChunk);
  }

  // [block] Begins the next round, if there is one.
  __device__ bool next_round() {
    if (state_.begin + lane_.exchange.source >= state_.largest) return false;
    __syncthreads();
    if (threadIdx.x == 0) {
      state_.begin += lane_.exchange.source;
      ++state_.number;
    }
    __syncthreads();
    return true;
  }

  // [block] The last step: the lane's call number becomes that of the last round.
  __device__ void finish(std::uint64_t first) {
    if (blockIdx.x == 0 && threadIdx.x == 0) lane_.state->further_rounds += state_.number - first;
    store_call_number(lane_, state_.number);
  }
  __device__ std::uint64_t number() const { return state_.number; }

 private:
  __device__ Operation operation() const { return call_.terms.operation; }

  // [thread] This rank's count. One that is known on the device only is checked here.
  __device__ std::int32_t read_count() const {
    if (call_.device_count == nullptr) return call_.count;
    const std::int32_t count = *call_.device_count;
    if (count >= 0 && count <= call_.count) return count;
    if (blockIdx.x == 0) {
      abort_call(lane_, lane_.state->calls[0] + 1, operation(), DeviceError::Reason::too_many, lane_.rank, 0,
                 count, call_.count);
    }
    return 0;
  }

  // [warp] Computes the sub-groups' offsets from the counts. Checks every rank's count against the memory: at
  // most `held` rows of the sub-group, or (`exact`) exactly as many; and `place` against the offset.
  __device__ bool place_blocks(bool exact) {
    const int thread = static_cast<int>(threadIdx.x);
    std::int64_t largest = 0;
    bool all_fit = true;
    for (int first = 0; first < lane_.ranks; first += 32) {
      const int rank = first + thread;
      const bool has = rank < lane_.ranks;
      std::uint64_t held = 0, place = 0;
      const bool received =
          !has || (await_header_word(lane_, state_.number, operation(), rank, kHeaderCounts, &held) &&
                   await_header_word(lane_, state_.number, operation(), rank, kHeaderCounts + 1, &place));
      if (!__all_sync(~0u, received)) return false;
      // All sub-groups have the same number of members; `begin` is the first rank of this one.
      const int begin = rank / call_.members * call_.members;
      std::int64_t before = 0, sum = 0;
      for (int other = 0; other < lane_.ranks; ++other) {
        const std::int64_t theirs = state_.rows[other];
        largest = ::max(largest, theirs);
        if (other < begin || other >= begin + call_.members) continue;
        if (other < rank) before += theirs;
        sum += theirs;
      }
      const auto room = static_cast<std::int64_t>(held);
      const std::int64_t row = static_cast<std::int64_t>(place) - 1;
      const bool fits = !has || (exact ? room == sum : room >= sum),
                 placed = !has || row < 0 || row == before || state_.rows[rank] == 0;
      const std::uint32_t wrong = ~__ballot_sync(~0u, fits && placed);
      if (has) {
        state_.bytes[rank] = state_.rows[rank] * call_.row_bytes;
        state_.offset[rank] = before * call_.row_bytes;
      }
      // The first rank that does not fit is reported.
      if (wrong != 0 && all_fit && blockIdx.x == 0 && thread == __ffs(static_cast<int>(wrong)) - 1) {
        abort_call(lane_, state_.number, operation(),
                   fits ? DeviceError::Reason::misplaced : DeviceError::Reason::rows_held, rank, 0,
                   fits ? row : room, fits ? before : sum);
        // Release at gpu scope: the error record is visible before the abort.
        set_aborted(lane_, state_.number);
      }
      all_fit = all_fit && wrong == 0;
    }
    if (thread == 0) state_.largest = largest * call_.row_bytes;
    return all_fit;
  }

  const GatherArguments& call_;
  const LaneView& lane_;
  GatherState& state_;
};

// [thread] Adds 16 bytes of each member's block at byte `at`, in rank order. `Call`: GatherArguments or
// AddedBlocks.
template <DType kType, class Call, class Addend>
__device__ __forceinline__ uint4 sum_of_vectors(const Call& call, Addend addend, std::int64_t at) {
  float sum[kPerAccess<kType>] = {};
  for (int member = call.first; member < call.first + call.members; ++member) {
    float value[kPerAccess<kType>];
    unpack<kType>(*reinterpret_cast<const uint4*>(addend(member) + at), value);
#pragma unroll
    for (int i = 0; i < kPerAccess<kType>; ++i) sum[i] = __fadd_rn(sum[i], value[i]);
  }
  return packed<kType>(sum);
}

// [thread] Stores the sum of one value.
template <DType kType, class Call, class Addend>
__device__ __forceinline__ void sum_value(const Call& call, Addend addend, std::int64_t at, std::byte* to) {
  float sum = 0;
  for (int member = call.first; member < call.first + call.members; ++member) {
    const std::byte* const from = addend(member) + at;
    std::uint32_t word;
    if constexpr (kType == DType::fp32) {
      word = *reinterpret_cast<const std::uint32_t*>(from);
    } else {
      word = *reinterpret_cast<const std::uint16_t*>(from);
    }
    sum = __fadd_rn(sum, value_of<kType>(word, 0));
  }
  if constexpr (kType == DType::fp32) {
    *reinterpret_cast<std::uint32_t*>(to + at) = bits_of(canonical(sum));
  } else {
    *reinterpret_cast<std::uint16_t*>(to + at) = static_cast<std::uint16_t>(pack_two<kType>(sum, 0));
  }
}

// [block] Adds the first `bytes` of the members' blocks, and those up to `whole` by 16.
template <DType kType, class Call, class Addend>
__device__ __forceinline__ void sum_blocks(const Call& call, Addend addend, std::byte* to, std::int64_t bytes,
                                           std::int64_t whole) {
  const std::int64_t thread = threadIdx.x + std::int64_t{kGatherThreads} * blockIdx.x,
                     threads = std::int64_t{kGatherThreads} * gridDim.x;
  for (std::int64_t at = 16 * thread; at < whole; at += 16 * threads)
    *reinterpret_cast<uint4*>(to + at) = sum_of_vectors<kType>(call, addend, at);
  const std::int64_t width = value_bytes(kType);
  for (std::int64_t at = whole + width * thread; at < bytes; at += width * threads)
    sum_value<kType>(call, addend, at, to);
}

// [block] Adds the data of the current round to this rank's sums.
template <DType kType>
__device__ void add_blocks(const GatherArguments& call, const GatherBlock& block) {
  const LaneView& lane = call.lane;
  const std::int64_t bytes = block.bytes_in_round(lane.rank), begin = block.begin();
  const std::byte* const own = call.rows + block.offset(lane.rank) + begin;
  std::byte* const to = call.out + begin;
  const auto addend = [&](int member) { return member == lane.rank ? own : block.received(member); };
  const auto both = reinterpret_cast<std::uintptr_t>(own) | reinterpret_cast<std::uintptr_t>(to);
  sum_blocks<kType>(call, addend, to, bytes, both % 16 == 0 ? bytes / 16 * 16 : 0);
}

// [block] Adds blocks in memory of this device.
template <DType kType>
__device__ void add_blocks(const AddedBlocks& call) {
  const auto addend = [&](int member) { return call.block[member]; };
  auto all = reinterpret_cast<std::uintptr_t>(call.out);
  for (int member = 0; member < call.members; ++member)
    all |= reinterpret_cast<std::uintptr_t>(call.block[member]);
  sum_blocks<kType>(call, addend, call.out, call.bytes, all % 16 == 0 ? call.bytes / 16 * 16 : 0);
}

// [block] The whole call. `call` and `state`: in shared memory.
__device__ inline void all_gather(const GatherArguments& call, GatherState* state) {
  GatherBlock block(call, state);
  if (!block.start()) return;
  const std::uint64_t first = block.number();
  const std::int64_t own = std::int64_t{state->count} * call.row_bytes;
  const auto send = [&] {
    const std::int64_t mine = block.bytes_of_round(own);
    block.send(mine, [&](int, std::int64_t* bytes) {
      *bytes = mine;
      return call.rows;
    });
  };
  // The first round needs no other rank's count, so it is on its way while the headers are.
  send();
  if (block.await_counts(false) && block.in_round()) {
    while (block.await_blocks()) {
      block.for_each_chunk(block.most_in_round(), [&](int source, std::int64_t at) {
        const std::int64_t bytes = block.bytes_in_round(source);
        if (at >= bytes) return;
        const std::byte* const from =
            source == call.lane.rank ? call.rows + block.begin() : block.received(source);
        copy_bytes(call.out + block.offset(source) + block.begin() + at, from + at,
                   ::min(kGatherChunk, bytes - at));
      });
      if (!block.next_round()) break;
      send();
    }
  }
  block.finish(first);
}

// [block] The whole call, as all_gather().
template <DType kType>
__device__ void reduce_scatter(const GatherArguments& call, GatherState* state) {
  GatherBlock block(call, state);
  if (!block.start()) return;
  const std::uint64_t first = block.number();
  if (block.await_counts(call.device_count == nullptr) && block.in_round()) {
    do {
      block.send(block.most_in_round(), [&](int peer, std::int64_t* bytes) {
        *bytes = block.bytes_in_round(peer);
        return call.rows + block.offset(peer);
      });
      if (!block.await_blocks()) break;
      add_blocks<kType>(call, block);
    } while (block.next_round());
  }
  block.finish(first);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
