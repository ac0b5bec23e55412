// dispatch_layout() with checked arguments, on the host and on devices.
#pragma once

#include "ferry/dispatch_layout.hpp"

namespace ferry {

// Checked arguments of dispatch_layout().
struct DispatchLayoutCall {
  Ids ids;
  std::int64_t tokens = 0;
  int top_k = 0;
  const Placement& placement;
  DispatchLayout result;
  const Topology* topology = nullptr;  // null: tokens_per_node is not wanted

  int nodes() const { return topology != nullptr ? topology->nodes() : 0; }
};

void dispatch_layout_on_host(const DispatchLayoutCall& call);
// Throws UnsupportedError in a build without the cuda backend.
void dispatch_layout_on_device(const DispatchLayoutCall& call, Stream stream);

}  // namespace ferry
