// What an exchange on a GPU maps: one chain for the size query and for construction.
#pragma once

#include "ferry/config.hpp"
#include "layout/device_signals.hpp"
#include "layout/exchange_layout.hpp"

namespace ferry::cuda {

// Throws UnsupportedError for what this backend cannot do: too many ranks or experts. `config` is complete.
void check_limits(const Config& config);

DeviceSignals device_signals(const Config& config);
ExchangeLayout device_layout(const Config& config);

// Tables that all lanes of an exchange share, in device memory.
struct ExchangeArrays {
  std::int64_t place = 0, expert_at = 0, first_expert = 0, group_capacities = 0;
  std::int64_t bytes = 0;
};
ExchangeArrays exchange_arrays(const Config& config);

// A lane's own memory on its device.
struct LaneArrays {
  std::int64_t state = 0, first_rows = 0, load = 0, metadata = 0;
  std::int64_t plan = 0;
  std::int64_t parts = 0;  // one area, laid out anew by every dispatch: formats differ in their parts
  std::int64_t weight = 0, local_ids = 0, dots = 0;
  std::int64_t group_expert = 0, counts = 0, row_offsets = 0;
  std::int64_t parts_bytes = 0;  // of the arrivals' parts
  std::int64_t bytes = 0;        // of everything
};
LaneArrays lane_arrays(const Config& config, int rank);

}  // namespace ferry::cuda
