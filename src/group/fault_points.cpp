#include "group/fault_points.hpp"

#ifdef FERRY_TEST_HOOKS

#include <atomic>

namespace ferry {
namespace {

std::atomic<FaultHook> installed_hook{nullptr};

}  // namespace

FaultHook set_fault_hook(FaultHook hook) {
  return installed_hook.exchange(hook);
}

void fault_point(FaultPoint point, int rank) {
  if (const FaultHook hook = installed_hook.load(std::memory_order_relaxed)) hook(point, rank);
}

const char* to_string(FaultPoint point) {
  switch (point) {
    case FaultPoint::construct_mapped:
      return "construct_mapped";
    case FaultPoint::dispatch_begin:
      return "dispatch_begin";
    case FaultPoint::dispatch_rows_sent:
      return "dispatch_rows_sent";
    case FaultPoint::dispatch_posted:
      return "dispatch_posted";
    case FaultPoint::dispatch_waited:
      return "dispatch_waited";
    case FaultPoint::dispatch_chunk_sent:
      return "dispatch_chunk_sent";
    case FaultPoint::dispatch_done:
      return "dispatch_done";
    case FaultPoint::combine_begin:
      return "combine_begin";
    case FaultPoint::combine_rows_sent:
      return "combine_rows_sent";
    case FaultPoint::combine_posted:
      return "combine_posted";
    case FaultPoint::combine_waited:
      return "combine_waited";
    case FaultPoint::combine_chunk_sent:
      return "combine_chunk_sent";
    case FaultPoint::combine_done:
      return "combine_done";
    case FaultPoint::metadata_begin:
      return "metadata_begin";
    case FaultPoint::metadata_posted:
      return "metadata_posted";
    case FaultPoint::metadata_waited:
      return "metadata_waited";
    case FaultPoint::route_values_begin:
      return "route_values_begin";
    case FaultPoint::route_values_sent:
      return "route_values_sent";
    case FaultPoint::route_values_posted:
      return "route_values_posted";
    case FaultPoint::route_values_waited:
      return "route_values_waited";
    case FaultPoint::gather_begin:
      return "gather_begin";
    case FaultPoint::gather_sent:
      return "gather_sent";
    case FaultPoint::gather_posted:
      return "gather_posted";
    case FaultPoint::gather_waited:
      return "gather_waited";
    case FaultPoint::relay_holds:
      return "relay_holds";
    case FaultPoint::hop_begin:
      return "hop_begin";
  }
  return "unknown";
}

}  // namespace ferry

#endif
