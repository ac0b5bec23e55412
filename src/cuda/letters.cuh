// Letters: once in every call each rank tells every rank (itself too) what the call is, and its counts.
#pragma once

#include "cuda/lane_view.hpp"
#include "cuda/ptx.cuh"
#include "cuda/wait.cuh"

namespace ferry::cuda {

// What a rank says of itself in a call, in memory all threads of the block see.
struct LetterContent {
  CallTerms terms;
  std::int32_t count;
  std::int32_t argument[kDeviceArguments];
};

// Of everything that the ranks must have alike. Different terms with one hash would pass for alike: 64 bits
// make that no concern.
__device__ inline std::uint64_t hash_of(const CallTerms& terms) {
  std::uint64_t hash = 0xcbf29ce484222325 + static_cast<std::uint64_t>(terms.operation);
#pragma unroll
  for (std::int64_t option : terms.option)
    hash = (hash ^ static_cast<std::uint64_t>(option)) * 0x9e3779b97f4a7c15 + (hash >> 29);
  return hash;
}

// By one whole warp: the letter to `peer`, not yet announced. `counts`: null, or E counts followed by R
// tokens, written by threads that this warp is ordered after.
__device__ inline void write_letter(const LaneView& lane, std::uint64_t call, int peer,
                                    const LetterContent& content, const std::int32_t* counts) {
  const int generation = static_cast<int>(call & 1), thread = threadIdx.x % 32;
  DeviceLetter* letter = lane.letter(peer, generation, lane.rank);
  if (counts != nullptr) {
    std::int32_t* to = lane.letter_counts(peer, generation, lane.rank);
    for (int i = thread; i < lane.experts + lane.ranks; i += 32) to[i] = counts[i];
  }
  if (thread < kDeviceOptions) letter->option[thread] = content.terms.option[thread];
  if (thread < kDeviceArguments) letter->argument[thread] = content.argument[thread];
  if (thread == 0) {
    letter->terms = hash_of(content.terms);
    letter->count = content.count;
    letter->operation = content.terms.operation;
    letter->refused = 0;
  }
}

// By one whole warp that is ordered after the writing of all letters: one fence for all of them.
__device__ inline void announce_letters(const LaneView& lane, std::uint64_t call) {
  const int peer = static_cast<int>(threadIdx.x % 32);
  __syncwarp();
  jitter(lane);
  if (peer >= lane.ranks) return;
  // Release, as a fence and a relaxed store: the letters and counts of all threads that wrote them, ordered
  // before this one by barriers, before their call numbers.
  fence_acq_rel_sys();
  store_relaxed_sys(&lane.letter(peer, static_cast<int>(call & 1), lane.rank)->call, call);
}

// By one whole warp: the letters to all ranks.
__device__ inline void post_letters(const LaneView& lane, std::uint64_t call, const LetterContent& content,
                                    const std::int32_t* counts) {
  for (int step = 1; step <= lane.ranks; ++step)
    write_letter(lane, call, (lane.rank + step) % lane.ranks, content, counts);
  announce_letters(lane, call);
}

// By one thread: ends the call early on this rank, with a word to the host. Later words of the same look are
// dropped: the first stands until the host has read it.
__device__ inline void end_call(const LaneView& lane, std::uint64_t call, Operation operation,
                                EndedCall::Why why, int peer, int index, std::int64_t mine,
                                std::int64_t theirs, const ErrorRecord* refusal = nullptr) {
  EndedCall* ended = lane.ended;
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
                                                    const LetterContent& mine, int peer) {
  const DeviceLetter* letter = lane.letter(lane.rank, static_cast<int>(call & 1), peer);
  const Operation operation = mine.terms.operation;
  if (letter->refused != 0) {
    end_call(lane, call, letter->operation, EndedCall::Why::refused, peer, 0, 0, 0, &letter->refusal);
    return;
  }
  if (letter->operation != operation) {
    end_call(lane, call, operation, EndedCall::Why::operation, peer, 0, static_cast<int>(operation),
             static_cast<int>(letter->operation));
    return;
  }
  int option = 0;
  while (option < kDeviceOptions - 1 && letter->option[option] == mine.terms.option[option]) ++option;
  end_call(lane, call, operation, EndedCall::Why::option, peer, option, mine.terms.option[option],
           letter->option[option]);
}

// By one whole warp: waits for every rank's letter, compares, and tells the other blocks when the call ends
// early. All letters are waited for even then: the next call may then overwrite what this one's peers have
// read.
__device__ inline bool await_letters(const LaneView& lane, std::uint64_t call, const LetterContent& mine) {
  const int peer = static_cast<int>(threadIdx.x % 32);
  const DeviceLetter* letter = lane.letter(lane.rank, static_cast<int>(call & 1), min(peer, lane.ranks - 1));
  const std::uint64_t terms = hash_of(mine.terms);
  bool came = true, alike = true;
  std::int32_t argument[kDeviceArguments] = {2, 2, 2};
  if (peer < lane.ranks) {
    came = wait_for(lane, &letter->call, nullptr, {mine.terms.operation, call, peer}) == Came::yes;
    alike = letter->terms == terms;
    for (int i = 0; i < kDeviceArguments; ++i) argument[i] = letter->argument[i];
  }
  if (!__all_sync(~0u, came)) return false;
  const std::uint32_t others = ~__ballot_sync(~0u, alike);
  bool agree = others == 0;
  if (!agree && peer == 0) name_difference(lane, call, mine, __ffs(static_cast<int>(others)) - 1);
  // An optional argument that one rank gives and another does not.
  for (int i = 0; i < kDeviceArguments && agree; ++i) {
    const std::uint32_t given = __ballot_sync(~0u, argument[i] == 1),
                        absent = __ballot_sync(~0u, argument[i] == 0);
    if (given == 0 || absent == 0) continue;
    agree = false;
    if (peer != 0) continue;
    const int giver = __ffs(static_cast<int>(given)) - 1;
    end_call(lane, call, mine.terms.operation, EndedCall::Why::given, giver, i, giver,
             __ffs(static_cast<int>(absent)) - 1);
  }
  // Release at gpu scope: the words to the host before the other blocks' end of the call.
  if (!agree && peer == 0) store_release_gpu(&lane.state->ended, call);
  return agree;
}

// By one thread of each block that sends, ordered after all that its block has sent: the last of them tells
// every rank that nothing more comes.
__device__ inline void finish_sending(const LaneView& lane, std::uint64_t call, int blocks,
                                      Phase phase = Phase::rows) {
  // Release and acquire at gpu scope: each block's flags before the last word of the last block.
  __threadfence();
  const unsigned before =
      atomicInc(&lane.state->finished[static_cast<int>(phase)], static_cast<unsigned>(blocks - 1));
  if (before != static_cast<unsigned>(blocks - 1)) return;
  jitter(lane);
  // Release at system scope, once for all ranks.
  fence_acq_rel_sys();
  for (int peer = 0; peer < lane.ranks; ++peer)
    store_relaxed_sys(lane.sent_flag(phase, peer, static_cast<int>(call & 1), lane.rank), call);
}

}  // namespace ferry::cuda
