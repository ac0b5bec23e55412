// The backend `cuda` in two hops, over any transport between nodes.
#pragma once

#include <memory>

#include "backends/cuda/host/hop_transport.hpp"
#include "exchange/backend.hpp"

namespace ferry::cuda {

// Collective. Throws UnsupportedError for more ranks than the kernels take.
std::unique_ptr<Backend> make_relayed_backend(const Rank& rank, const Config& config,
                                              const MakeHopTransport& make_hops);

}  // namespace ferry::cuda
