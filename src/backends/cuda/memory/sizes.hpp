// What an exchange on a GPU maps: one chain for the size query and for construction.
#pragma once

#include "ferry/config.hpp"
#include "layout/device_signals.hpp"
#include "layout/exchange_layout.hpp"

namespace ferry::cuda {

// Throws UnsupportedError for what this backend cannot do: too many ranks or experts. `config` is complete.
void check_limits(const Config& config);

DeviceSignals device_signals(const Config& config);

// Symmetric memory of a lane: the sections of the exchange's layout, then the lane's own memory for arrived
// rows, as large on every rank as any needs.
struct DeviceLayout {
  ExchangeLayout exchange;  // of one lane
  std::int64_t received;    // bytes

  std::int64_t lane_bytes() const { return exchange.lane_bytes() + received; }
  std::int64_t bytes() const { return exchange.shape.lanes * lane_bytes(); }
};
DeviceLayout device_layout(const Config& config);

// Tables that all lanes of an exchange share, in device memory.
struct ExchangeArrays {
  std::int64_t routing = 0;  // RoutingTables
  std::int64_t bytes = 0;
};
ExchangeArrays exchange_arrays(const Config& config);

// A lane's own memory on its device.
struct LaneArrays {
  std::int64_t state = 0, block_counts = 0, block_counted = 0, load = 0, metadata = 0;
  std::int64_t plan = 0;
  std::int64_t weight = 0, local_ids = 0, dots = 0;
  std::int64_t group_expert = 0, counts = 0, row_offsets = 0;
  std::int64_t bytes = 0;  // of everything
};
LaneArrays lane_arrays(const Config& config, int rank);

}  // namespace ferry::cuda
