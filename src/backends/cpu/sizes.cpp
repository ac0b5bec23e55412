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

Sizes cpu_sizes(const Config& config, int rank) {
  const ExchangeLayout layout = symmetric_layout(config);
  const LocalArrays arrays = local_arrays(config, rank);
  const std::int64_t lanes = config.lanes;
  return {.dispatch_staging = 2 * lanes * layout.dispatch,
          .combine_staging = 2 * lanes * layout.combine,
          .signals = lanes * layout.signals,
          .results = lanes * arrays.parts_bytes,
          .plans = lanes * (arrays.bytes - arrays.parts_bytes)};
}

}  // namespace cpu

Sizes cpu_backend_sizes(const Config& config, int rank) {
  return cpu::cpu_sizes(config, rank);
}

}  // namespace ferry
