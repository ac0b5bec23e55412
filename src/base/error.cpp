#include "ferry/error.hpp"

#include "base/text.hpp"

namespace ferry {

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::ok:
      return "ok";
    case ErrorCode::usage:
      return "usage";
    case ErrorCode::overflow:
      return "overflow";
    case ErrorCode::timeout:
      return "timeout";
    case ErrorCode::peer_lost:
      return "peer lost";
    case ErrorCode::system:
      return "system";
    case ErrorCode::unsupported:
      return "unsupported";
  }
  return "unknown";
}

const char* to_string(Operation operation) {
  switch (operation) {
    case Operation::none:
      return "none";
    case Operation::construct:
      return "construct";
    case Operation::dispatch:
      return "dispatch";
    case Operation::combine:
      return "combine";
    case Operation::metadata:
      return "metadata";
    case Operation::route_values:
      return "route_values";
    case Operation::dispatch_counts:
      return "dispatch_counts";
    case Operation::all_gather_v:
      return "all_gather_v";
    case Operation::reduce_scatter_v:
      return "reduce_scatter_v";
    case Operation::barrier:
      return "barrier";
  }
  return "unknown";
}

const char* to_string(WaitRole role) {
  switch (role) {
    case WaitRole::none:
      return "none";
    case WaitRole::sender:
      return "sender";
    case WaitRole::relay:
      return "relay";
    case WaitRole::receiver:
      return "receiver";
  }
  return "unknown";
}

std::string describe(const WaitRecord& record) {
  const std::string role = record.role == WaitRole::none ? "" : str(", as ", to_string(record.role), ","),
                    awaited = record.peer < 0 ? std::string("its peers") : str("rank ", record.peer),
                    node = record.node < 0 ? "" : str(" on node ", record.node),
                    relay = record.via < 0 ? "" : str(" by way of rank ", record.via);
  return str("rank ", record.rank, role, " waited for ", awaited,
             record.peer < 0 ? relay + node : node + relay, " in ", to_string(record.operation), " ",
             record.call, " (expected ", record.expected, ", observed ", record.observed, ")");
}

}  // namespace ferry
