// The streams that one lane's calls are given on a rank: refuses a stream that another rank has given to the
// same call.
#pragma once

#include <cstdint>

#include "backends/cuda/host/stream_registry.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda {

class LaneStreams {
 public:
  // `exchange`: null where no other rank of this process uses the device; then everything below has no
  // effect.
  LaneStreams(const void* exchange, int lane, int rank, int device)
      : exchange_(exchange), lane_(lane), rank_(rank), device_(device) {}
  ~LaneStreams() {
    if (exchange_ != nullptr) StreamRegistry::of_process().forget(exchange_, rank_);
  }
  LaneStreams(const LaneStreams&) = delete;
  LaneStreams& operator=(const LaneStreams&) = delete;

  // The rank whose call `number` has been given a stream in order with this one, or -1. Ends at the first
  // captured call: replays run on other streams and take call numbers that the host does not see.
  int other_rank_on(Stream stream, std::uint64_t number);

  // Throws UsageError if there is such a rank.
  void require_own(Operation operation, Stream stream, std::uint64_t number);

 private:
  const void* exchange_;
  const int lane_, rank_, device_;
  bool captured_ = false;
};

}  // namespace ferry::cuda
