// Findings that do not stop a call: bad ids, damaged plan entries and overflows. check() takes them while
// calls run (diagnostics_reader.hpp).
//
// Kernels only ever add to the counts, and the host remembers what it has reported: nothing that a kernel
// finds between the host's read and the end of check() is lost. A position, such as that of the first bad id,
// is the first since the last report: each kind of finding has a report number, which the host raises when it
// takes the position; a kernel that sees a new number stores a new position.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "ferry/error.hpp"
#include "layout/device_signals.hpp"

namespace ferry::cuda {

// Findings of one kind, in device memory.
struct FindingCount {
  Flag report;               // number of the next report; the host raises it, kernels read it
  std::uint64_t first_in;    // report to which the stored position belongs; 0: none stored yet
  unsigned long long count;  // of all calls
};

// Findings of one lane, in device memory.
struct DeviceDiagnostics {
  FindingCount bad_ids;
  std::int64_t first_bad_id_route, first_bad_id;
  FindingCount overflows;  // calls with more rows than a rank has room for
  Overflow overflow;
  FindingCount bad_sources;             // entries of plans that cannot be right; first_in is not used:
  unsigned long long first_bad_source;  // lowest bad_source_key() of all
  unsigned long long bad_scales;        // pieces of NVFP4 rows with a scale that could not be formed

  // Before the first call.
  static constexpr DeviceDiagnostics none() {
    DeviceDiagnostics none{};
    none.bad_ids.report.value = none.overflows.report.value = none.bad_sources.report.value = 1;
    none.first_bad_source = ~0ull;
    return none;
  }
};

// Many threads find bad plan entries at once, and the lowest index is to be reported. The keys of a later
// report are lower than all earlier ones.
FERRY_HD constexpr unsigned long long bad_source_key(std::uint64_t report, std::int64_t index) {
  return ~report << 32 | static_cast<std::uint32_t>(index);
}

// Reasons why a plan, or the arguments beside it, cannot be used. Only the device can see them: plans lie in
// its memory.

enum class PlanFault : std::int32_t {
  none,
  damaged,             // the header does not match its checksum
  configuration,       // made by an exchange of another configuration or placement
  arrays,              // of a combine by source: they make no plan
  rank,                // made on another rank
  tokens,              // another number of tokens than in this call
  outputs_and_result,  // combine: outputs are null for rows of the plan, or the result for tokens
  values,              // combine: row_values or route_values is missing
  weights,             // combine: topk_weights that travel are null where the plan has tokens
  null_values          // route_values, return_values: an array is null where the plan has tokens or rows
};

}  // namespace ferry::cuda
