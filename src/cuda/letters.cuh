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

// By one whole warp: the letter to `peer`. `counts`: null, or E counts followed by R tokens, written by
// threads that this warp is ordered after.
__device__ inline void post_letter(const LaneView& lane, std::uint64_t call, int peer,
                                   const LetterContent& content, const std::int32_t* counts) {
  const int generation = static_cast<int>(call & 1), thread = threadIdx.x % 32;
  DeviceLetter* letter = lane.letter(peer, generation, lane.rank);
  if (counts != nullptr) {
    std::int32_t* to = lane.letter_counts(peer, generation, lane.rank);
    for (int i = thread; i < lane.experts + lane.ranks; i += 32) to[i] = counts[i];
  }
  if (thread < content.terms.option_count) letter->option[thread] = content.terms.option[thread];
  if (thread < kDeviceArguments) letter->argument[thread] = content.argument[thread];
  if (thread == 0) {
    letter->operation = content.terms.operation;
    letter->refused = 0;
    letter->option_count = content.terms.option_count;
    letter->count = content.count;
  }
  __syncwarp();
  jitter(lane);
  // Release: the letter and the counts of all the warp's threads (ordered by the barrier above) before its
  // call.
  if (thread == 0) store_release_sys(&letter->call, call);
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

// By one thread, with the letter of `peer` here: true if the call goes on.
__device__ inline bool agree_with(const LaneView& lane, std::uint64_t call, const LetterContent& mine,
                                  int peer) {
  const DeviceLetter* letter = lane.letter(lane.rank, static_cast<int>(call & 1), peer);
  const Operation operation = mine.terms.operation;
  if (letter->refused != 0) {
    end_call(lane, call, letter->operation, EndedCall::Why::refused, peer, 0, 0, 0, &letter->refusal);
    return false;
  }
  if (letter->operation != operation) {
    end_call(lane, call, operation, EndedCall::Why::operation, peer, 0, static_cast<int>(operation),
             static_cast<int>(letter->operation));
    return false;
  }
  for (int i = 0; i < mine.terms.option_count; ++i) {
    if (letter->option[i] == mine.terms.option[i]) continue;
    end_call(lane, call, operation, EndedCall::Why::option, peer, i, mine.terms.option[i], letter->option[i]);
    return false;
  }
  return true;
}

// All letters of a call are here: an optional argument that one rank gives and another does not ends it.
__device__ inline bool agree_on_arguments(const LaneView& lane, std::uint64_t call, Operation operation) {
  const int generation = static_cast<int>(call & 1);
  for (int argument = 0; argument < kDeviceArguments; ++argument) {
    int given = -1, absent = -1;
    for (int peer = lane.ranks - 1; peer >= 0; --peer) {
      const std::int32_t word = lane.letter(lane.rank, generation, peer)->argument[argument];
      if (word == 1) given = peer;
      if (word == 0) absent = peer;
    }
    if (given < 0 || absent < 0) continue;
    end_call(lane, call, operation, EndedCall::Why::given, given, argument, given, absent);
    return false;
  }
  return true;
}

// By one whole warp: waits for every rank's letter, compares, and tells the other blocks when the call ends
// early. All letters are waited for even then: the next call may then overwrite what this one's peers have
// read.
__device__ inline bool await_letters(const LaneView& lane, std::uint64_t call, const LetterContent& mine) {
  const int peer = static_cast<int>(threadIdx.x % 32);
  bool agree = true;
  if (peer < lane.ranks) {
    const std::uint64_t* flag = &lane.letter(lane.rank, static_cast<int>(call & 1), peer)->call;
    agree = wait_for(lane, flag, nullptr, {mine.terms.operation, call, peer}) == Came::yes;
  }
  if (!__all_sync(~0u, agree)) return false;
  // The other threads' acquires before this thread's reads.
  __syncwarp();
  if (peer == 0) {
    for (int other = 0; other < lane.ranks && agree; ++other) agree = agree_with(lane, call, mine, other);
    if (agree) agree = agree_on_arguments(lane, call, mine.terms.operation);
    // Release at gpu scope: the words to the host before the other blocks' end of the call.
    if (!agree) store_release_gpu(&lane.state->ended, call);
  }
  return __shfl_sync(~0u, agree, 0);
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
  __threadfence();
  jitter(lane);
  for (int peer = 0; peer < lane.ranks; ++peer)
    store_release_sys(lane.sent_flag(phase, peer, static_cast<int>(call & 1), lane.rank), call);
}

}  // namespace ferry::cuda
