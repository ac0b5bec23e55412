#include "backends/cuda/host/diagnostics_reader.hpp"

#include <cstddef>

namespace ferry::cuda {

CallDiagnostics DiagnosticsReader::take(
    const std::function<DeviceDiagnostics()>& read,
    const std::function<void(std::int64_t offset, std::uint64_t number)>& start_report) {
  const DeviceDiagnostics counted = read();
  const auto is_new = [](const FindingCount& found, const Reported& reported) {
    return found.count > reported.count;
  };
  const bool ids = is_new(counted.bad_ids, bad_ids_), overflows = is_new(counted.overflows, overflows_),
             sources = is_new(counted.bad_sources, bad_sources_);
  CallDiagnostics diagnostics;
  if (counted.bad_scales > bad_scales_) diagnostics.bad_scale.rank = rank_;
  bad_scales_ = counted.bad_scales;
  if (!ids && !overflows && !sources) return diagnostics;
  // Kernels store a finding's position before the count that `counted` reads, and only once in a report.
  const DeviceDiagnostics found = read();
  if (ids) start_report(offsetof(DeviceDiagnostics, bad_ids.report), ++bad_ids_.report);
  if (overflows) start_report(offsetof(DeviceDiagnostics, overflows.report), ++overflows_.report);
  if (sources) start_report(offsetof(DeviceDiagnostics, bad_sources.report), ++bad_sources_.report);
  const DeviceDiagnostics after = read();
  // Findings after `found` belong to the next report if their position is stored for it, and to this one if
  // their kernel has still seen its number.
  const auto report = [](const FindingCount& before, const FindingCount& now, bool in_next,
                         Reported* reported) {
    const std::uint64_t until = in_next ? before.count : now.count, count = until - reported->count;
    reported->count = until;
    return static_cast<std::int64_t>(count);
  };
  if (ids) {
    diagnostics.bad_id = {
        .rank = rank_,
        .token = static_cast<int>(found.first_bad_id_route / top_k_),
        .slot = static_cast<int>(found.first_bad_id_route % top_k_),
        .id = found.first_bad_id,
        .count = report(found.bad_ids, after.bad_ids, after.bad_ids.first_in == bad_ids_.report, &bad_ids_)};
  }
  if (sources) {
    const bool in_next = after.first_bad_source < bad_source_key(bad_sources_.report - 1, 0);
    diagnostics.bad_source = {.rank = rank_,
                              .index = static_cast<std::uint32_t>(found.first_bad_source),
                              .count = report(found.bad_sources, after.bad_sources, in_next, &bad_sources_)};
  }
  if (overflows) {
    report(found.overflows, after.overflows, after.overflows.first_in == overflows_.report, &overflows_);
    diagnostics.overflow = found.overflow;
  }
  return diagnostics;
}

}  // namespace ferry::cuda
