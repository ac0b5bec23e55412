// How ranks that run already meet: they discover which of them are on one host, and share a control block
// there.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <string>

#include "ferry/topology.hpp"
#include "group/bootstrap_link.hpp"
#include "group/control_block.hpp"

namespace ferry {

// Where a rank runs, as plain data that ranks exchange. Equal for ranks that can share memory, watch each
// other's processes and pass files to each other. Copies of one virtual machine may have equal identities
// too, which the exchange of the control block's file reveals.
struct HostIdentity {
  std::uint64_t pid_namespace = 0;  // process numbers mean nothing in another namespace
  std::uint64_t ipc_namespace = 0;
  std::uint64_t network_namespace = 0;  // sockets of another namespace cannot be reached
  std::uint64_t simulated = 0;          // hash of the simulated host's name; 0: none
  char boot_id[40] = {};                // of the running kernel

  // Identity of the calling process. `host_id`: name of a simulated host; empty: none.
  static HostIdentity of_this_process(const std::string& host_id);

  auto operator<=>(const HostIdentity&) const = default;
};

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
