#include "backends/cpu/sizes.hpp"

#include "backends/cpu/lane.hpp"
#include "exchange/backend.hpp"
#include "group/channel.hpp"

namespace ferry {
namespace cpu {

ExchangeLayout symmetric_layout(const Config& config) {
  return exchange_layout(
      exchange_shape(config, Channel::bytes(config.placement.ranks(), call_summary_bytes(config))));
}

Sizes local_sizes(const Config& config, int rank) {
  const LocalArrays arrays = local_arrays(config, rank);
  return {.results = config.lanes * arrays.parts_bytes,
          .plans = config.lanes * (arrays.bytes - arrays.parts_bytes)};
}

Sizes cpu_sizes(const Config& config, int rank) {
  const ExchangeLayout layout = symmetric_layout(config);
  Sizes sizes = local_sizes(config, rank);
  sizes.dispatch_staging = 2 * config.lanes * layout.dispatch;
  sizes.combine_staging = 2 * config.lanes * layout.combine;
  sizes.signals = config.lanes * layout.signals;
  return sizes;
}

}  // namespace cpu

Sizes cpu_backend_sizes(const Config& config, const Topology& topology, int rank) {
  if (has_relays(config, topology)) return relayed_cpu_backend_sizes(config, topology, rank);
  return cpu::cpu_sizes(config, rank);
}

}  // namespace ferry
