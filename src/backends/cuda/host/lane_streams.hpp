// The streams on which a rank enqueues one lane's calls. Refuses a stream that another rank has used for the
// same call.
#pragma once

#include <cstdint>

#include "backends/cuda/host/stream_registry.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda {

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
