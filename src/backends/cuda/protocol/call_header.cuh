// Call headers: in every call each rank sends every rank (itself too) a header with the operation, the
// options that must be equal on all ranks, and its counts. All ranks thereby find a mismatch before the call
// goes on.
//
// A header is a run of LL packets (layout/device_signals.hpp): each holds the call number beside its payload
// and is stored in one access. A reader that finds the call number has the payload; no fence is needed.
#pragma once

#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/wait.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// The fixed part of this rank's header, in shared memory.
struct CallHeader {
  AgreedOptions terms;
  HeaderFacts facts;
};

// [thread] Completes the terms, whose other options the host has filled in.
__device__ __forceinline__ void set_epoch(const Epoch& epoch, CallHeader* header) {
  header->terms.set(kEpochOption, static_cast<std::int64_t>(epoch.number));
}

__device__ inline HeaderFacts make_header_facts(Operation operation, std::int32_t count) {
  HeaderFacts facts;
  facts.count = count;
  facts.operation = static_cast<std::uint8_t>(operation);
  return facts;
}

// Payload of packet `i` of the fixed part, the packets before the counts.
__device__ __forceinline__ std::uint64_t header_word(const CallHeader& content, int i) {
  if (i == kHeaderTerms) return content.terms.hash;
  if (i == kHeaderFacts) return content.facts.word();
  return static_cast<std::uint64_t>(content.terms.option[i - kHeaderOptions]);
}

inline constexpr int kPeersAtOnce = 4;  // stores in flight

// [thread] Packet `i` of the headers to all ranks, starting with the next rank.
__device__ __forceinline__ void post_header_word(const LaneView& lane, std::uint64_t call, int i,
                                                 std::uint64_t word) {
  const int ranks = lane.ranks;
  const std::int64_t packet = lane.signals.header(static_cast<int>(call & 1), lane.rank) +
                              i * static_cast<std::int64_t>(sizeof(LLPacket));
#pragma unroll 1
  for (int first = 1; first <= ranks; first += kPeersAtOnce) {
#pragma unroll
    for (int step = first; step < first + kPeersAtOnce; ++step) {
      if (step > ranks) break;
      const int next = lane.rank + step, peer = next < ranks ? next : next - ranks;
      inject_fault(lane, KernelPoint::header);
      store_packet_relaxed_sys(memory::at<LLPacket>(lane, peer, packet), {call, word});
    }
  }
}

// [warp] The fixed part of the headers to all ranks.
//
// No release is needed before it. A rank that has this header may overwrite staging that this rank read in
// earlier calls; those reads belong to kernels that have ended, so they cannot see the new bytes.
__device__ __forceinline__ void post_header(const LaneView& lane, std::uint64_t call,
                                            const CallHeader& content) {
  const int i = static_cast<int>(threadIdx.x % 32);
  if (i < kHeaderCounts) post_header_word(lane, call, i, header_word(content, i));
}

// [`threads` threads] The counts in the headers to all ranks. `counts`: in the order of device_signals.hpp,
// an even number of them, aligned to 8 bytes.
__device__ __forceinline__ void post_header_counts(const LaneView& lane, std::uint64_t call,
                                                   const std::int32_t* counts, int thread, int threads) {
  const auto* pairs = reinterpret_cast<const std::uint64_t*>(counts);
#pragma unroll 1
  for (int i = thread; i < lane.signals.count_words; i += threads)
    post_header_word(lane, call, kHeaderCounts + i, pairs[i]);
}

// [thread] Waits for packet `i` of the header from `peer`. False: the call was aborted.
__device__ __forceinline__ bool await_header_word(const LaneView& lane, std::uint64_t call,
                                                  Operation operation, int peer, int i, std::uint64_t* word) {
  const LLPacket* packet = memory::header(lane, lane.rank, static_cast<int>(call & 1), peer) + i;
  const LLPacket seen = load_packet_relaxed_sys(packet);
  *word = seen.word;
  return seen.call >= call ||
         wait_for_packet(lane, packet, {operation, call, peer}, word) == WaitResult::ready;
}

// [thread] Waits for the two packets that every header has, also a refusal. Both are loaded at once: one
// round trip instead of two. False: the call was aborted.
__device__ __forceinline__ bool await_header(const LaneView& lane, const WaitTarget& awaited,
                                             std::uint64_t* terms, std::uint64_t* facts) {
  const auto [operation, call, peer, _] = awaited;
  const LLPacket* header = memory::header(lane, lane.rank, static_cast<int>(call & 1), peer);
#pragma unroll 1
  for (unsigned poll = 0; poll < kQuickPolls; ++poll) {
    const LLPacket terms_packet = load_packet_relaxed_sys(header + kHeaderTerms),
                   facts_packet = load_packet_relaxed_sys(header + kHeaderFacts);
    *terms = terms_packet.word;
    *facts = facts_packet.word;
    if (terms_packet.call >= call && facts_packet.call >= call) return true;
  }
  return await_header_word(lane, call, operation, peer, kHeaderTerms, terms) &&
         await_header_word(lane, call, operation, peer, kHeaderFacts, facts);
}

// [thread] Records for the host why the call is aborted on this rank. One thread of a call writes the record,
// whichever claims it first, and only if the host has read the record of the calls before; other errors are
// dropped. The calls of a lane follow one another, so no thread of another call writes at the same time.
static __device__ __noinline__ void abort_call(const LaneView& lane, std::uint64_t call, Operation operation,
                                               DeviceError::Reason reason, int peer, int index,
                                               std::int64_t mine, std::int64_t theirs,
                                               const ErrorRecord* refusal = nullptr) {
  DeviceError* error = lane.device_error;
  if (atomicExch(&lane.state->error_claimed, call) == call) return;
  // Acquire: the host has copied the record before it clears the number.
  if (load_acquire_sys(&error->call) != 0) return;
  if (refusal != nullptr) error->refusal = *refusal;
  error->operation = operation;
  error->reason = reason;
  error->peer = peer;
  error->index = index;
  error->mine = mine;
  error->theirs = theirs;
  // Release: the host reads the other members after this word.
  store_release_sys(&error->call, call);
}

// [thread] Finds out how the header of `peer`, whose hash differs from this rank's, differs, and records it.
static __device__ __noinline__ void report_mismatch(const LaneView& lane, std::uint64_t call,
                                                    const CallHeader& mine, int peer, std::uint64_t terms,
                                                    HeaderFacts facts) {
  const auto operation = mine.terms.operation, theirs = static_cast<Operation>(facts.operation);
  if (terms == 0) {
    // Acquire, as a fence after the relaxed load of the refusal's packet: the record may be read now.
    fence_acq_rel_sys();
    abort_call(lane, call, theirs, DeviceError::Reason::refused, peer, 0, 0, 0,
               memory::refusal(lane, lane.rank, static_cast<int>(call & 1), peer));
    return;
  }
  if (theirs != operation) {
    abort_call(lane, call, operation, DeviceError::Reason::operation, peer, 0, static_cast<int>(operation),
               static_cast<int>(theirs));
    return;
  }
#pragma unroll 1
  for (int option = 0; option < kDeviceOptions; ++option) {
    std::uint64_t word = 0;
    if (!await_header_word(lane, call, operation, peer, kHeaderOptions + option, &word)) return;
    const std::int64_t own = mine.terms.option[option], other = static_cast<std::int64_t>(word);
    if (own == other && option + 1 < kDeviceOptions) continue;
    abort_call(lane, call, operation, DeviceError::Reason::option, peer, option, own, other);
    return;
  }
}

// [warp] Waits for every rank's header and compares it with this rank's, in narrow kernels. Thread i gets the
// facts of rank i in `theirs`. `coordinates`: this warp also reports a mismatch to the host and aborts the
// call for the other blocks. Returns whether the call goes on.
//
// Even an aborted call waits for all headers: the next call of this parity overwrites staging, and a peer's
// header of this call shows that the peer has finished the calls before (docs/protocol-gpu.md).
__device__ inline bool await_all_headers(const LaneView& lane, std::uint64_t call, const CallHeader& mine,
                                         bool coordinates, HeaderFacts* theirs) {
  const int peer = static_cast<int>(threadIdx.x % 32);
  std::uint64_t terms = mine.terms.hash, facts = make_header_facts(mine.terms.operation, 0).word();
  bool received = true, alike = true;
  if (peer < lane.ranks) {
    const std::uint64_t own = terms;
    received = await_header(lane, {mine.terms.operation, call, peer}, &terms, &facts);
    alike = terms == own;
  }
  *theirs = HeaderFacts::of(facts);
  if (!__all_sync(~0u, received)) return false;
  const std::uint32_t different = ~__ballot_sync(~0u, alike);
  bool agree = different == 0;
  if (!agree && coordinates && peer == __ffs(static_cast<int>(different)) - 1)
    report_mismatch(lane, call, mine, peer, terms, *theirs);
  // Optional arguments: given on all ranks that have data for them, or on none.
  for (int i = 0; i < kDeviceArguments && agree; ++i) {
    const std::uint32_t given = __ballot_sync(~0u, theirs->argument[i] == 1),
                        absent = __ballot_sync(~0u, theirs->argument[i] == 0);
    if (given == 0 || absent == 0) continue;
    agree = false;
    if (peer != 0 || !coordinates) continue;
    const int giver = __ffs(static_cast<int>(given)) - 1;
    abort_call(lane, call, mine.terms.operation, DeviceError::Reason::given, giver, i, giver,
               __ffs(static_cast<int>(absent)) - 1);
  }
  __syncwarp();
  // Release at gpu scope: the error record before the abort that the other blocks see.
  if (!agree && coordinates && peer == 0) set_aborted(lane, call);
  return agree;
}

// [warp] await_all_headers() for any number of ranks: calls use(rank, facts) for each rank, in some thread.
template <class Use>
__device__ inline bool await_all_headers_wide(const LaneView& lane, std::uint64_t call,
                                              const CallHeader& mine, bool coordinates, Use&& use) {
  const int thread = static_cast<int>(threadIdx.x % 32);
  bool agree = true;
  int giver[kDeviceArguments], lacker[kDeviceArguments];  // the lowest ranks with and without an argument
  for (int i = 0; i < kDeviceArguments; ++i) giver[i] = lacker[i] = -1;
#pragma unroll 1
  for (int first = 0; first < lane.ranks; first += 32) {
    const int peer = first + thread;
    const bool has = peer < lane.ranks;
    std::uint64_t terms = mine.terms.hash, word = make_header_facts(mine.terms.operation, 0).word();
    bool alike = true, received = true;
    if (has) {
      received = await_header(lane, {mine.terms.operation, call, peer}, &terms, &word);
      alike = terms == mine.terms.hash;
    }
    if (!__all_sync(~0u, received)) return false;
    const HeaderFacts theirs = HeaderFacts::of(word);
    if (has) use(peer, theirs);
    const std::uint32_t different = ~__ballot_sync(~0u, alike);
    // Only the first rank that differs is reported.
    if (different != 0 && agree && coordinates && thread == __ffs(static_cast<int>(different)) - 1)
      report_mismatch(lane, call, mine, peer, terms, theirs);
    agree = agree && different == 0;
    for (int i = 0; i < kDeviceArguments; ++i) {
      const std::uint32_t given = __ballot_sync(~0u, theirs.argument[i] == 1),
                          absent = __ballot_sync(~0u, theirs.argument[i] == 0);
      if (giver[i] < 0 && given != 0) giver[i] = first + __ffs(static_cast<int>(given)) - 1;
      if (lacker[i] < 0 && absent != 0) lacker[i] = first + __ffs(static_cast<int>(absent)) - 1;
    }
  }
  for (int i = 0; i < kDeviceArguments && agree; ++i) {
    if (giver[i] < 0 || lacker[i] < 0) continue;
    agree = false;
    if (thread == 0 && coordinates)
      abort_call(lane, call, mine.terms.operation, DeviceError::Reason::given, giver[i], i, giver[i],
                 lacker[i]);
  }
  __syncwarp();
  // Release at gpu scope: the error record before the abort that the other blocks see.
  if (!agree && coordinates && thread == 0) set_aborted(lane, call);
  return agree;
}

// [warp] Waits for every rank's header, for callers that need nothing of it but that it agrees.
__device__ __forceinline__ bool agree_with_all(const LaneView& lane, std::uint64_t call,
                                               const CallHeader& mine, bool coordinates) {
  if constexpr (kWide) {
    return await_all_headers_wide(lane, call, mine, coordinates, [](int, const HeaderFacts&) {});
  } else {
    HeaderFacts theirs;
    return await_all_headers(lane, call, mine, coordinates, &theirs);
  }
}

// [thread] Called once by each sending block, ordered after everything the block has sent. The last of the
// `blocks` sets the end-of-stream flag at every rank: nothing more of this payload comes from this rank.
__device__ inline void publish_end_of_stream(const LaneView& lane, std::uint64_t call, int blocks,
                                             Payload payload = Payload::rows) {
  // Release and acquire at gpu scope: every block's flags before the end-of-stream flag, which the last block
  // sets.
  __threadfence();
  const unsigned before =
      atomicInc(&lane.state->finished[static_cast<int>(payload)], static_cast<unsigned>(blocks - 1));
  if (before != static_cast<unsigned>(blocks - 1)) return;
  inject_fault(lane, KernelPoint::end_of_stream);
  // Release at system scope, once for all ranks.
  fence_acq_rel_sys();
#pragma unroll 1
  for (int peer = 0; peer < lane.ranks; ++peer)
    store_relaxed_sys(memory::end_of_stream_flag(lane, payload, peer, static_cast<int>(call & 1), lane.rank),
                      call);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
