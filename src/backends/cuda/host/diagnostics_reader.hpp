// The host's side of a lane's diagnostics: remembers what check() has reported, and takes what is new.
#pragma once

#include <cstdint>
#include <functional>

#include "backends/cuda/protocol/diagnostics.hpp"
#include "exchange/backend.hpp"

namespace ferry::cuda {

class DiagnosticsReader {
 public:
  DiagnosticsReader(int rank, int top_k) : rank_(rank), top_k_(top_k) {}

  // Returns the findings of kernels since the last call of take(). `read` copies the diagnostics from the
  // device, `start_report` stores a report number there (its offset is in bytes); kernels may run meanwhile.
  CallDiagnostics take(const std::function<DeviceDiagnostics()>& read,
                       const std::function<void(std::int64_t offset, std::uint64_t number)>& start_report);

 private:
  struct Reported {
    std::uint64_t count = 0, report = 1;
  };

  int rank_, top_k_;
  Reported bad_ids_, overflows_, bad_sources_;
  std::uint64_t bad_scales_ = 0;  // counted so far
};

}  // namespace ferry::cuda
