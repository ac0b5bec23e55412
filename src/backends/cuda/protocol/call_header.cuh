// Letters: once in every call each rank tells every rank (itself too) what the call is, and its counts.
#pragma once

#include "backends/cuda/device/lane_view.hpp"
#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/protocol/wait.cuh"

namespace ferry::cuda {

// What a rank says of itself in a call, in memory all threads of the block see.
struct HeaderContent {
  CallTerms terms;
  HeaderFacts facts;
};

__device__ inline HeaderFacts facts_of(Operation operation, std::int32_t count) {
  HeaderFacts facts;
  facts.count = count;
  facts.operation = static_cast<std::uint8_t>(operation);
  return facts;
}

// Word `i` of a letter before its counts.
__device__ __forceinline__ std::uint64_t head_word(const HeaderContent& content, int i) {
  if (i == kHeaderTerms) return content.terms.hash;
  if (i == kHeaderFacts) return content.facts.word();
  return static_cast<std::uint64_t>(content.terms.option[i - kHeaderOptions]);
}

inline constexpr int kPeersAtOnce = 4;

// By one thread: word `i` of the letters to all ranks.
__device__ __forceinline__ void post_word(const LaneView& lane, std::uint64_t call, int i,
                                          std::uint64_t word) {
  const int ranks = lane.ranks;
  const std::int64_t unit = lane.signals.header(static_cast<int>(call & 1), lane.rank) +
                            i * static_cast<std::int64_t>(sizeof(LLPacket));
#pragma unroll 1
  for (int first = 1; first <= ranks; first += kPeersAtOnce) {
#pragma unroll
    for (int step = first; step < first + kPeersAtOnce; ++step) {
      if (step > ranks) break;
      const int next = lane.rank + step, peer = next < ranks ? next : next - ranks;
      inject_fault(lane, Point::header);
      store_packet_relaxed_sys(lane.at<LLPacket>(peer, unit), {call, word});
    }
  }
}

// By one warp that sees the content: what the letters to all ranks begin with. Every unit announces itself,
// so nothing is fenced: what a letter's reader may do next concerns memory that this rank's earlier kernels
// have read, and those have ended.
__device__ __forceinline__ void post_head(const LaneView& lane, std::uint64_t call,
                                          const HeaderContent& content) {
  const int i = static_cast<int>(threadIdx.x % 32);
  if (i < kHeaderCounts) post_word(lane, call, i, head_word(content, i));
}

// By `threads` threads: the counts in the letters to all ranks, as device_signals.hpp orders them, in an even
// number, at a multiple of 8 bytes.
__device__ __forceinline__ void post_counts(const LaneView& lane, std::uint64_t call,
                                            const std::int32_t* counts, int thread, int threads) {
  const auto* pairs = reinterpret_cast<const std::uint64_t*>(counts);
#pragma unroll 1
  for (int i = thread; i < lane.signals.count_words; i += threads)
    post_word(lane, call, kHeaderCounts + i, pairs[i]);
}

// Word `i` of the letter from `peer`. False: the call has ended early.
__device__ __forceinline__ bool await_word(const LaneView& lane, std::uint64_t call, Operation operation,
                                           int peer, int i, std::uint64_t* word) {
  const LLPacket* unit = lane.header(lane.rank, static_cast<int>(call & 1), peer) + i;
  const LLPacket seen = load_packet_relaxed_sys(unit);
  *word = seen.word;
  return seen.call >= call || wait_for_unit(lane, unit, {operation, call, peer}, word) == WaitResult::yes;
}

// The words that every letter has, asked for at once.
__device__ __forceinline__ bool await_head(const LaneView& lane, const Awaited& awaited, std::uint64_t* terms,
                                           std::uint64_t* facts) {
  const auto [operation, call, peer, _] = awaited;
  const LLPacket* header = lane.header(lane.rank, static_cast<int>(call & 1), peer);
#pragma unroll 1
  for (unsigned look = 0; look < kQuickPolls; ++look) {
    const LLPacket of_terms = load_packet_relaxed_sys(header + kHeaderTerms),
                   of_facts = load_packet_relaxed_sys(header + kHeaderFacts);
    *terms = of_terms.word;
    *facts = of_facts.word;
    if (of_terms.call >= call && of_facts.call >= call) return true;
  }
  return await_word(lane, call, operation, peer, kHeaderTerms, terms) &&
         await_word(lane, call, operation, peer, kHeaderFacts, facts);
}

// By one thread: ends the call early on this rank, with a word to the host. Later words of the same look are
// dropped: the first stands until the host has read it.
static __device__ __noinline__ void end_call(const LaneView& lane, std::uint64_t call, Operation operation,
                                             DeviceError::Why why, int peer, int index, std::int64_t mine,
                                             std::int64_t theirs, const ErrorRecord* refusal = nullptr) {
  DeviceError* ended = lane.ended;
  if (load_acquire_sys(&ended->call) != 0) return;
  if (refusal != nullptr) ended->refusal = *refusal;
  ended->operation = operation;
  ended->why = why;
  ended->peer = peer;
  ended->index = index;
  ended->mine = mine;
  ended->theirs = theirs;
  // Release: the host reads the rest after this word.
  store_release_sys(&ended->call, call);
}

// By one thread, with a letter here whose terms are not this rank's: says which.
static __device__ __noinline__ void name_difference(const LaneView& lane, std::uint64_t call,
                                                    const HeaderContent& mine, int peer, std::uint64_t terms,
                                                    HeaderFacts facts) {
  const auto operation = mine.terms.operation, theirs = static_cast<Operation>(facts.operation);
  if (terms == 0) {
    // Acquire, as a fence after the relaxed load of the refusal's facts: the record before its reads.
    fence_acq_rel_sys();
    end_call(lane, call, theirs, DeviceError::Why::refused, peer, 0, 0, 0,
             lane.refusal(lane.rank, static_cast<int>(call & 1), peer));
    return;
  }
  if (theirs != operation) {
    end_call(lane, call, operation, DeviceError::Why::operation, peer, 0, static_cast<int>(operation),
             static_cast<int>(theirs));
    return;
  }
#pragma unroll 1
  for (int option = 0; option < kDeviceOptions; ++option) {
    std::uint64_t word = 0;
    if (!await_word(lane, call, operation, peer, kHeaderOptions + option, &word)) return;
    const std::int64_t own = mine.terms.option[option], other = static_cast<std::int64_t>(word);
    if (own == other && option + 1 < kDeviceOptions) continue;
    end_call(lane, call, operation, DeviceError::Why::option, peer, option, own, other);
    return;
  }
}

// By one whole warp: waits for every rank's letter and compares. `theirs`: facts of the rank that is this
// thread's. `coordinates`: this warp also tells the host of a difference, and the other blocks that the call
// ends early. All letters are waited for even then: the next call may then overwrite what this one's peers
// have read.
__device__ inline bool await_headers(const LaneView& lane, std::uint64_t call, const HeaderContent& mine,
                                     bool coordinates, HeaderFacts* theirs) {
  const int peer = static_cast<int>(threadIdx.x % 32);
  std::uint64_t terms = mine.terms.hash, facts = facts_of(mine.terms.operation, 0).word();
  bool came = true, alike = true;
  if (peer < lane.ranks) {
    const std::uint64_t own = terms;
    came = await_head(lane, {mine.terms.operation, call, peer}, &terms, &facts);
    alike = terms == own;
  }
  *theirs = HeaderFacts::of(facts);
  if (!__all_sync(~0u, came)) return false;
  const std::uint32_t others = ~__ballot_sync(~0u, alike);
  bool agree = others == 0;
  if (!agree && coordinates && peer == __ffs(static_cast<int>(others)) - 1)
    name_difference(lane, call, mine, peer, terms, *theirs);
  // An optional argument that one rank gives and another does not.
  for (int i = 0; i < kDeviceArguments && agree; ++i) {
    const std::uint32_t given = __ballot_sync(~0u, theirs->argument[i] == 1),
                        absent = __ballot_sync(~0u, theirs->argument[i] == 0);
    if (given == 0 || absent == 0) continue;
    agree = false;
    if (peer != 0 || !coordinates) continue;
    const int giver = __ffs(static_cast<int>(given)) - 1;
    end_call(lane, call, mine.terms.operation, DeviceError::Why::given, giver, i, giver,
             __ffs(static_cast<int>(absent)) - 1);
  }
  __syncwarp();
  // Release at gpu scope: the words to the host before the other blocks' end of the call.
  if (!agree && coordinates && peer == 0) store_release_gpu(&lane.state->ended, call);
  return agree;
}

// By one thread of each block that sends, ordered after all that its block has sent: the last of them tells
// every rank that nothing more comes.
__device__ inline void finish_sending(const LaneView& lane, std::uint64_t call, int blocks,
                                      Payload phase = Payload::rows) {
  // Release and acquire at gpu scope: each block's flags before the last word of the last block.
  __threadfence();
  const unsigned before =
      atomicInc(&lane.state->finished[static_cast<int>(phase)], static_cast<unsigned>(blocks - 1));
  if (before != static_cast<unsigned>(blocks - 1)) return;
  inject_fault(lane, Point::last);
  // Release at system scope, once for all ranks.
  fence_acq_rel_sys();
#pragma unroll 1
  for (int peer = 0; peer < lane.ranks; ++peer)
    store_relaxed_sys(lane.end_of_stream_flag(phase, peer, static_cast<int>(call & 1), lane.rank), call);
}

}  // namespace ferry::cuda
