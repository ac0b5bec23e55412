// Named points of the protocol at which tests stall, delay, throw in or kill a rank. Compiled into test
// builds only (FERRY_TEST_HOOKS); in a production build fault_point() is empty.
#pragma once

#include <array>

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

inline constexpr std::array kFaultPoints = {
    FaultPoint::construct_mapped,    FaultPoint::dispatch_begin,      FaultPoint::dispatch_rows_sent,
    FaultPoint::dispatch_posted,     FaultPoint::dispatch_waited,     FaultPoint::dispatch_chunk_sent,
    FaultPoint::dispatch_done,       FaultPoint::combine_begin,       FaultPoint::combine_rows_sent,
    FaultPoint::combine_posted,      FaultPoint::combine_waited,      FaultPoint::combine_chunk_sent,
    FaultPoint::combine_done,        FaultPoint::metadata_begin,      FaultPoint::metadata_posted,
    FaultPoint::metadata_waited,     FaultPoint::route_values_begin,  FaultPoint::route_values_sent,
    FaultPoint::route_values_posted, FaultPoint::route_values_waited, FaultPoint::gather_begin,
    FaultPoint::gather_sent,         FaultPoint::gather_posted,       FaultPoint::gather_waited,
    FaultPoint::relay_holds,         FaultPoint::hop_begin,
};

const char* to_string(FaultPoint point);

#ifdef FERRY_TEST_HOOKS

// Called by every rank of the process at every point, on the rank's own thread. It may sleep, throw or not
// return.
using FaultHook = void (*)(FaultPoint point, int rank);

// Installs a hook, or none, for the whole process, and returns the one before. Call it while no rank runs.
FaultHook set_fault_hook(FaultHook hook);

void fault_point(FaultPoint point, int rank);

#else

inline void fault_point(FaultPoint, int) {}

#endif

}  // namespace ferry
