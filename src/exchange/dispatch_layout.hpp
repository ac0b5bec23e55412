// dispatch_layout() on the host and on devices.
#pragma once

#include "ferry/dispatch_layout.hpp"

namespace ferry {

// Arguments of dispatch_layout(). `topology`: null without tokens_per_node.
struct DispatchLayoutCall : RankIds {
  DispatchLayout result;

  int nodes() const { return topology != nullptr ? topology->nodes() : 0; }
};

// These take checked arguments.
void dispatch_layout_on_host(const DispatchLayoutCall& call);
// Throws UnsupportedError in a build without the cuda backend.
void dispatch_layout_on_device(const DispatchLayoutCall& call, Stream stream);

}  // namespace ferry
