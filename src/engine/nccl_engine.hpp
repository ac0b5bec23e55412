// The engine `nccl`: grouped sends and receives of NCCL between the devices of the ranks.
#pragma once

#include <memory>

#include "engine/device_stream.hpp"
#include "engine/engine.hpp"
#include "ferry/group.hpp"

namespace ferry {

// Local; its communicators are made collectively. Transfers of host memory go through the device. `deadline`:
// seconds for making a communicator.
//
// communicators() throws UnsupportedError on all ranks if one of them has no NCCL, or if two share a device,
// which NCCL does not allow; TimeoutError or PeerLostError if a rank does not come.
std::unique_ptr<Engine> make_nccl_engine(const Rank& rank, double deadline, DeviceAccess device);

}  // namespace ferry
