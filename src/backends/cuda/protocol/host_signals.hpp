// How the host and running kernels signal each other: words in pinned host memory.
#pragma once

#include <cstdint>

#include "base/error_record.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

// One for each exchange and rank.
struct HostSignals {
  std::uint32_t abort;      // set by the host: every wait of this exchange ends at once
  std::uint32_t timed_out;  // set by the first wait that timed out, after `timeout` (release)
  WaitRecord timeout;
};

// Why a call was aborted on the device. One for each lane; `call` is stored last (release), 0: no error.
struct DeviceError {
  enum class Reason : std::int32_t {
    refused,    // `peer` refused the call, for the reason in `refusal`
    operation,  // the peer called operation `theirs`, this rank `mine`
    option,     // option number `index` is `mine` here and `theirs` on the peer
    given,      // optional argument `index` is given on rank `mine` and not on rank `theirs`
    too_many,   // a count in device memory is `mine`; at most `theirs` are allowed
    bad_plan    // `index` is a PlanFault; `mine` and `theirs` are the numbers that do not fit
  };

  std::uint64_t call;
  Operation operation;
  Reason reason;
  std::int32_t peer;
  std::int32_t index;
  std::int64_t mine, theirs;
  ErrorRecord refusal;
};

}  // namespace ferry::cuda
