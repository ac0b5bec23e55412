// Where a rank runs, as plain data that ranks exchange.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace ferry {

// Equal for ranks that can share memory, watch each other's processes and pass files to each other. Copies of
// one virtual machine may have equal identities too, which the exchange of the control block's file reveals.
struct HostIdentity {
  std::uint64_t pid_namespace = 0;  // process numbers mean nothing in another namespace
  std::uint64_t ipc_namespace = 0;
  std::uint64_t network_namespace = 0;  // sockets of another namespace cannot be reached
  std::uint64_t simulated = 0;          // hash of the simulated host's name; 0: none
  char boot_id[40] = {};                // of the running kernel

  // Of the calling process. `host_id`: name of a simulated host; empty: none.
  static HostIdentity of_this_process(const std::string& host_id);

  auto operator<=>(const HostIdentity&) const = default;
};

}  // namespace ferry
