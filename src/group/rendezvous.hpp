// How ranks that run already meet: they discover which of them are on one host, and share a control block
// there.
#pragma once

#include <memory>
#include <string>

#include "ferry/topology.hpp"
#include "group/bootstrap_link.hpp"
#include "group/control_block.hpp"

namespace ferry {

// What a rank knows after it has met the others.
struct Meeting {
  std::shared_ptr<ControlBlock> control;  // of the ranks on this host: the entries of the others stay unused
  Topology topology;
};

// Collective over all ranks. Ranks are on one host if they have the boot id, the PID, IPC and network
// namespaces and `host_id` (any text) in common. Each step waits for `deadline` seconds at most.
//
// @throws TimeoutError      a rank has not called in time, or a rank of this host is stopped
// @throws UnsupportedError  ranks look as if they were on one host, but cannot reach each other's sockets
// @throws UsageError        the bootstrap mixed up the ranks
// @throws SystemError       on every rank: one of them cannot share the memory
Meeting meet(BootstrapLink& link, int rank, int ranks, const std::string& host_id, double deadline);

}  // namespace ferry
