// What exchanges of the GPU backends map. Compiled without CUDA too: nothing here needs a GPU.
#include "backends/cuda/host/memory_layout.hpp"
#include "backends/cuda/two_hops/hop_layout.hpp"
#include "exchange/backend.hpp"
#include "exchange/configuration.hpp"

namespace ferry {

Sizes cuda_backend_sizes(const Config& config, const Topology& topology, int rank) {
  if (has_relays(config, topology)) return relayed_cuda_backend_sizes(config, topology, rank);
  cuda::check_limits(config);
  const cuda::DeviceLayout layout = cuda::device_layout(config);
  const std::int64_t lanes = config.lanes;
  return {.dispatch_staging = 2 * lanes * layout.exchange.dispatch,
          .combine_staging = 2 * lanes * layout.exchange.combine,
          .signals = lanes * layout.exchange.signals,
          .results = lanes * layout.received,
          .plans = lanes * cuda::lane_arrays(config, rank).bytes + cuda::exchange_arrays(config).bytes};
}

Sizes device_collective_sizes(const Config& config, const Topology& topology, int rank) {
  cuda::check_limits(config);
  const cuda::EngineLayout layout = cuda::engine_layout(config, topology, rank);
  const std::int64_t lanes = config.lanes, received = layout.bytes - layout.received,
                     working = layout.received - layout.signals_end;
  return {.results = lanes * received,
          .plans =
              lanes * (cuda::lane_arrays(config, rank).bytes + working) + cuda::exchange_arrays(config).bytes,
          .messages = lanes * layout.signals_end};
}

Sizes relayed_cuda_backend_sizes(const Config& config, const Topology& topology, int rank) {
  cuda::check_limits(config);
  const cuda::EngineLayout engine = cuda::engine_layout(config, topology, rank);
  const cuda::HopLayout hops = cuda::hop_layout(config, topology, engine.header_bytes, engine.row_bytes);
  Sizes sizes = device_collective_sizes(config, topology, rank);
  sizes.dispatch_staging = config.lanes * (hops.bytes - hops.signals_end);
  sizes.signals = config.lanes * hops.signals_end;
  sizes.plans += config.lanes * cuda::HopWorkingMemory::of(hops.shape).bytes;
  return sizes;
}

Sizes nvshmem_backend_sizes(const Config& config, const Topology& topology, int rank) {
  return topology.nodes() == 1 ? cuda_backend_sizes(config, topology, rank)
                               : relayed_cuda_backend_sizes(config, topology, rank);
}

}  // namespace ferry
