// What the host tells running kernels, and what they leave for it: plain words in pinned memory.
#pragma once

#include <cstdint>

#include "ferry/error.hpp"
#include "group/error_record.hpp"

namespace ferry::cuda {

// One for each exchange and rank.
struct HostReport {
  std::uint32_t abort;      // set by the host: every wait of this exchange ends at once
  std::uint32_t timed_out;  // set by the first wait that ran out of time, after `timeout` (release)
  WaitRecord timeout;
};

// Why a call of a lane ended before its time on the device. `call` is stored last (release); 0: none has.
struct DeviceError {
  enum class Why : std::int32_t {
    refused,    // by `peer`, with `refusal`
    operation,  // of the peer: `theirs` where this rank has `mine`
    option,     // number `index` differs: `mine` here, `theirs` at the peer
    given,      // optional argument `index` is given on rank `mine` and not on rank `theirs`
    too_many,   // `mine` tokens read from device memory, at most `theirs`
    bad_plan    // a plan, or arguments beside it: `index` is a PlanFault, `mine` and `theirs` the numbers
  };

  std::uint64_t call;
  Operation operation;
  Why why;
  std::int32_t peer;
  std::int32_t index;
  std::int64_t mine, theirs;
  ErrorRecord refusal;
};

}  // namespace ferry::cuda
