// The engine `nccl`: grouped sends and receives of NCCL between the devices of the ranks.
#pragma once

#include <memory>

#include "engine/engine.hpp"
#include "group/rank_state.hpp"

namespace ferry {

// The rank's engine `nccl`: made by the first call, and kept as long as the rank. All exchanges of a group
// share a communicator, so that calls in different order meet in it. `deadline`: seconds for making it.
// `device`: that of the exchange under construction.
//
// communicators() throws UnsupportedError on all ranks if one of them has no NCCL, or if two share a device,
// which NCCL does not allow; TimeoutError or PeerLostError if a rank does not come. Transfers of host memory
// go through `device`'s link of the host, if it has one and all ranks are on one host, else through the
// device. The end of the last lane that uses the communicator waits up to half the deadline for the other
// ranks to end theirs.
Engine& nccl_engine_of(RankState& rank, double deadline, DeviceAccess device);

// A new engine. `rank` outlives it and its communicators.
std::shared_ptr<Engine> make_nccl_engine(RankState& rank, double deadline, DeviceAccess device);

}  // namespace ferry
