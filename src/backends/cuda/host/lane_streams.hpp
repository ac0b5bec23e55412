// The streams on which a rank enqueues one lane's calls. Refuses a stream that another rank has used for the
// same call.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "ferry/error.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda {

// Finds ranks of one process that give one stream of a GPU to the same call: the kernel of one of them would
// wait for the kernel behind it until the deadline.

// The properties of a stream that decide its order with other streams.
struct StreamIdentity {
  int device = 0;
  const void* handle = nullptr;    // null for the legacy default stream
  bool waits_for_default = false;  // a blocking stream: in order with the legacy default stream

  // Whether work on one of the streams waits for earlier work on the other.
  friend bool in_order(const StreamIdentity& a, const StreamIdentity& b) {
    if (a.device != b.device) return false;
    if (a.handle == nullptr || b.handle == nullptr)
      return (a.handle == nullptr || a.waits_for_default) && (b.handle == nullptr || b.waits_for_default);
    return a.handle == b.handle;
  }
};

// One for the process. Thread-safe.
class StreamRegistry {
 public:
  static StreamRegistry& of_process();

  // Records that `rank` enqueues call `number` of the lane on `stream`, and returns -1. If another rank has
  // used a stream in order with it for the same call, records nothing and returns that rank. `exchange`: the
  // same address on all ranks of an exchange.
  int record(const void* exchange, int lane, int rank, std::uint64_t number, const StreamIdentity& stream);

  // The rank has destroyed the exchange.
  void forget(const void* exchange, int rank);

 private:
  struct Use {
    int rank;
    std::uint64_t number;
    StreamIdentity stream;
  };

  std::mutex mutex_;
  std::map<std::pair<const void*, int>, std::vector<Use>>
      uses_;  // the last of each rank, by exchange and lane
};

class LaneStreams {
 public:
  // `exchange`: null if no other rank of this process uses the device; then everything below has no effect.
  LaneStreams(const void* exchange, int lane, int rank, int device)
      : exchange_(exchange), lane_(lane), rank_(rank), device_(device) {}
  ~LaneStreams() {
    if (exchange_ != nullptr) StreamRegistry::of_process().forget(exchange_, rank_);
  }
  LaneStreams(const LaneStreams&) = delete;
  LaneStreams& operator=(const LaneStreams&) = delete;

  // The rank that has enqueued call `number` on a stream in order with this one, or -1. Checks no more calls
  // after the first captured one: replays run on other streams and take call numbers that the host does not
  // see.
  int other_rank_on(Stream stream, std::uint64_t number);

  // Throws UsageError if there is such a rank.
  void require_own(Operation operation, Stream stream, std::uint64_t number);

 private:
  const void* exchange_;
  const int lane_, rank_, device_;
  bool captured_ = false;
};

}  // namespace ferry::cuda
