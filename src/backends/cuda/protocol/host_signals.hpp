// How the host and running kernels signal each other: words in pinned host memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "base/errors.hpp"
#include "ferry/error.hpp"
#include "ferry/topology.hpp"
#include "layout/device_signals.hpp"

namespace ferry::cuda {

// Accesses of the host to flags.
inline std::uint64_t load_acquire(const Flag& flag) {
  return std::atomic_ref(const_cast<Flag&>(flag).value).load(std::memory_order_acquire);
}
inline void store_release(Flag& flag, std::uint64_t value) {
  std::atomic_ref(flag.value).store(value, std::memory_order_release);
}

// One for each exchange and rank.
struct HostSignals {
  Flag abort;  // the epoch in which the group has failed, set by the host: every wait of this exchange ends
  Flag timed_out;  // the epoch of the first wait that timed out in it, set after `timeout` (release)
  WaitRecord timeout;
};

// The record of the wait that timed out in `epoch`, if there is one.
inline std::optional<WaitRecord> timeout_of(const HostSignals& signals, std::uint64_t epoch) {
  // Acquire: the kernel stores the record before it store-releases `timed_out`.
  if (load_acquire(signals.timed_out) != epoch) return std::nullopt;
  WaitRecord record = signals.timeout;
  record.node = -1;  // the report is memory that was zeroed
  return record;
}
// The record of a timeout, with the node of the missing rank.
inline std::optional<WaitRecord> timeout_of(const HostSignals& signals, std::uint64_t epoch,
                                            const Topology& topology) {
  std::optional<WaitRecord> record = timeout_of(signals, epoch);
  if (!record || topology.nodes() == 1) return record;
  const int missing = record->peer >= 0 ? record->peer : record->via;
  if (missing >= 0) record->node = topology.node_of(missing);
  return record;
}

// Why a call was aborted on the device. One for each lane; `call` is stored last (release), 0: no error.
struct DeviceError {
  enum class Reason : std::int32_t {
    refused,    // `peer` refused the call, for the reason in `refusal`
    operation,  // the peer called operation `theirs`, this rank `mine`
    option,     // option number `index` is `mine` here and `theirs` on the peer
    given,      // optional argument `index` is given on rank `mine` and not on rank `theirs`
    too_many,   // a count in device memory is `mine`; at most `theirs` are allowed
    rows_held,  // of a gather: `peer` holds, or has room for, `mine` rows, where the counts add up to
                // `theirs`
    misplaced,  // of a gather: the rows of `peer` lie at row `mine` of the memory, and not at `theirs`, their
                // own
    slices,     // experts in slices: `index` is a SliceFault, and `other` of raise_slice_fault(); `peer` its
                // rank
    source,     // a combine by source: `index` is a SourceFault and its limit; `mine` and `theirs` are two
                // numbers each
    bad_plan    // `index` is a PlanFault; `mine` and `theirs` are the numbers that do not fit
  };

  Flag call;
  Operation operation;
  Reason reason;
  std::int32_t peer;
  std::int32_t index;
  std::int64_t mine, theirs;
  ErrorRecord refusal;
};

// Copies the error record, if there is one, and frees it for the next.
inline std::optional<DeviceError> take_error(DeviceError& record) {
  // Acquire: the kernel stores the other members before the call number.
  if (load_acquire(record.call) == 0) return std::nullopt;
  const DeviceError error = record;
  // Release: the copy comes before the next kernel's write to a record that is free again.
  store_release(record.call, 0);
  return error;
}

}  // namespace ferry::cuda
