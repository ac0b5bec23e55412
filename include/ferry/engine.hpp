// The caller's own transport: functions through which the backend `collective` moves bytes between ranks.
#pragma once

#include <cstdint>
#include <functional>

namespace ferry {

/// A transport of the caller, for a group made by Group::custom(). Ferry calls these functions on a thread of
/// its own, never on the caller's. They must not call Ferry: collective calls of the same group and its
/// exchanges throw UsageError then.
struct EngineFunctions {
  /// Collective over all ranks of the group. Sends `send_bytes[p]` bytes at `send + send_offsets[p]` to rank
  /// p, and receives `receive_bytes[p]` bytes of rank p at `receive + receive_offsets[p]`. Returns when both
  /// buffers may be used again; reports a failure by throwing.
  ///
  /// The arrays are [R], in bytes. What p sends to q is as long as what q receives from p. Entries may be 0,
  /// and this rank's own is always 0. The arrays are host memory. Buffers are valid until the function
  /// returns; they are host memory, or with `device_memory` in some calls memory of the rank's CUDA device,
  /// the same on all ranks. The device has finished writing what is sent, and uses what is received only
  /// after the return.
  ///
  /// `lane` is a number that the calls of one lane have on every rank. It counts the lanes of all exchanges
  /// of the group: if the first exchange has two lanes, the second begins with lane 2.
  std::function<void(int lane, const void* send, const std::int64_t* send_bytes,
                     const std::int64_t* send_offsets, void* receive, const std::int64_t* receive_bytes,
                     const std::int64_t* receive_offsets)>
      all_to_all_v;

  /// Makes every blocked all_to_all_v() of this rank throw. Called at most once, from a thread of its own,
  /// when a deadline has passed or a peer is lost; the engine is not used afterwards. Without it, or if a
  /// call stays blocked, the call's thread and buffers are abandoned and never freed.
  std::function<void()> abort = {};

  /// true: all_to_all_v() is called for one lane at a time, and needs the same order of lanes on all ranks.
  /// false: it is called for several lanes at once, from a thread for each, and calls of a lane meet whatever
  /// the order of the others.
  bool ordered_lanes = true;

  /// true: all_to_all_v() also takes buffers in CUDA device memory, which Config::memory = device needs.
  bool device_memory = false;
};

}  // namespace ferry
