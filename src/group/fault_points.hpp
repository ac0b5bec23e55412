// Named points of the protocol at which tests stall, delay, throw in or kill a rank. Compiled into test
// builds only (FERRY_TEST_HOOKS); in a production build fault_point() is empty.
#pragma once

#include <atomic>

#include "base/enumerators.hpp"

namespace ferry {

enum class FaultPoint : int {
  construct_mapped,     // symmetric memory is mapped, the exchange not yet usable
  dispatch_begin,       // the call has its number, nothing is written
  dispatch_rows_sent,   // rows are stored at the peers, no flag is
  dispatch_posted,      // flags are stored at the peers
  dispatch_waited,      // every peer's flag was seen, no row is read
  dispatch_chunk_sent,  // rows of a later chunk are stored at the peers, their flag is not
  dispatch_done,        // the received rows are in their positions
  combine_begin,
  combine_rows_sent,
  combine_posted,
  combine_waited,
  combine_chunk_sent,
  combine_done,
  metadata_begin,
  metadata_posted,
  metadata_waited,
  route_values_begin,
  route_values_sent,
  route_values_posted,
  route_values_waited,
  gather_begin,  // all_gather_v, reduce_scatter_v: a round has its number; the ranks' counts are known
  gather_sent,   // rows of the round are stored at the peers, no flag is
  gather_posted,
  gather_waited,
  relay_holds,  // two hops: a rank has the messages of the first, and has forwarded none
  hop_begin,    // two hops: the ranks agree to a call with messages; this one has sent none
};

inline const char* to_string(FaultPoint point) {
  return name_of(point, {"construct_mapped",    "dispatch_begin",
                         "dispatch_rows_sent",  "dispatch_posted",
                         "dispatch_waited",     "dispatch_chunk_sent",
                         "dispatch_done",       "combine_begin",
                         "combine_rows_sent",   "combine_posted",
                         "combine_waited",      "combine_chunk_sent",
                         "combine_done",        "metadata_begin",
                         "metadata_posted",     "metadata_waited",
                         "route_values_begin",  "route_values_sent",
                         "route_values_posted", "route_values_waited",
                         "gather_begin",        "gather_sent",
                         "gather_posted",       "gather_waited",
                         "relay_holds",         "hop_begin"});
}

#ifdef FERRY_TEST_HOOKS

// Called by every rank of the process at every point, on the rank's own thread. It may sleep, throw or not
// return.
using FaultHook = void (*)(FaultPoint point, int rank);

inline std::atomic<FaultHook> installed_fault_hook = nullptr;

// Installs a hook, or none, for the whole process, and returns the one before. Call it while no rank runs.
inline FaultHook set_fault_hook(FaultHook hook) {
  return installed_fault_hook.exchange(hook);
}

inline void fault_point(FaultPoint point, int rank) {
  if (const FaultHook hook = installed_fault_hook.load(std::memory_order_relaxed)) hook(point, rank);
}

#else

inline void fault_point(FaultPoint, int) {}

#endif

}  // namespace ferry
