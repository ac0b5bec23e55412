// Sizes and offsets of the device memory of an exchange, for construction and for the size query alike.
#pragma once

#include <cstddef>
#include <vector>

#include "ferry/config.hpp"
#include "format/parts.hpp"
#include "layout/device_signals.hpp"
#include "layout/exchange_layout.hpp"

namespace ferry::cuda {

// Throws UnsupportedError if the configuration, which must be complete, exceeds a limit of this backend.
void check_limits(const Config& config);

DeviceSignals device_signals(const Config& config);

// Symmetric memory of a lane: the sections of the exchange's layout, then the receive buffer for rows, which
// has the same size on every rank: the largest that any rank needs.
struct DeviceLayout {
  ExchangeLayout exchange;  // of one lane
  std::int64_t received;    // bytes of the receive buffer, 0 without own_receive_buffers
  std::int64_t tiles;       // offset in it of the tiles of scales, which come last, if there are any

  std::int64_t lane_bytes() const { return exchange.lane_bytes() + received; }
  std::int64_t bytes() const { return exchange.shape.lanes * lane_bytes(); }
};
DeviceLayout device_layout(const Config& config);

// Offsets of the arrays in device memory that all lanes of an exchange share.
struct ExchangeArrays {
  std::int64_t routing = 0;          // RoutingTables
  std::int64_t epoch = 0;            // Epoch
  std::int64_t timeout_claimed = 0;  // LaneView::timeout_claimed
  std::int64_t bytes = 0;
};
ExchangeArrays exchange_arrays(const Config& config);
// The contents of the RoutingTables.
std::vector<std::byte> routing_tables(const Config& config);

// Offsets of the arrays in a lane's private device memory.
struct LaneArrays {
  std::int64_t state = 0, block_counts = 0, block_counted = 0, load = 0, metadata = 0;
  std::int64_t symmetric = 0;  // the table of LaneView::symmetric
  std::int64_t plan = 0;
  std::int64_t weight = 0, local_ids = 0, dots = 0;
  std::int64_t group_expert = 0, counts = 0, row_offsets = 0, tile_offsets = 0;
  std::int64_t scale_rows = 0;      // scales by rows, which become tiles, without own receive buffers
  std::int64_t input_scales = 0;    // [E + S], kept from a send phase for its receive phase
  std::int64_t shared_outputs = 0;  // [S, T, H] of the combine type
  std::int64_t bytes = 0;           // of all arrays
};
LaneArrays lane_arrays(const Config& config, int rank);

}  // namespace ferry::cuda
