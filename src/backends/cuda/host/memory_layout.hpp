// Sizes and offsets of the device memory of an exchange, for construction and for the size query alike.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backends/cuda/protocol/lane_view.hpp"
#include "ferry/config.hpp"
#include "ferry/topology.hpp"
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
  std::int64_t state = 0, block_counts = 0, block_counted = 0, load = 0, joined = 0;
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

// The device memory of a lane whose messages a carrier moves, by an engine or in two hops. Other ranks'
// kernels never write it.
//
// A rank stores its messages in an outbox, with a block for each rank: call header, end-of-stream flags,
// messages. The carrier moves the used part of each block to the same place of the receiver's inbox, where
// kernels read it as if the sender had stored it there. Messages for the own rank are stored in the inbox
// directly.
//
//   block    | header, end-of-stream flags | message | message ... | flags of messages, which stay here |
//   message  | parts | slot metadata |
//
// The rows of a combine are packed (PackedRows) in an outbox and an inbox of rows.

// A part of a lane's memory. Bytes.
struct LaneRegion {
  std::int64_t begin, bytes;
};

struct EngineLayout {
  std::int64_t header_bytes;  // of a block, the flags included; messages begin here
  std::int64_t block_bytes;
  std::int64_t flags;                     // in a block
  std::int32_t row_bytes, label_offset;   // of a packed row
  std::int64_t sent_rows, received_rows;  // most packed rows

  // Offsets in a lane's memory. Bytes.
  std::int64_t inbox, outbox, row_inbox, row_outbox, signals_end;
  std::int64_t first_row, rows, arrived;  // see PackedRows
  std::int64_t row_flags;                 // of combine's rows
  std::int64_t row_weights;               // fp32 for each row here: weights received from the source ranks
  std::int64_t token_ranks, route_rank;   // see AddOnNodesArguments
  // Over an engine. A call uses them for messages or for rows; first_inbox is row_inbox. With one hop the
  // others are empty.
  LaneRegion first_outbox, first_inbox, second_outbox, second_inbox;
  std::int64_t payload_of;        // see NumberPayloadsArguments
  std::int64_t row_of, place_of;  // see RelaySumsArguments
  std::int64_t received;          // the lane's receive buffers
  std::int64_t bytes;             // of a lane
};

EngineLayout engine_layout(const Config& config, const Topology& topology, int rank);

// Bytes of a message whose parts take `part_bytes`.
std::int64_t engine_message_bytes(std::int64_t part_bytes, std::int32_t top_k);

// Sets the addresses of the view's messages, whose parts take `part_bytes`.
void place_engine_messages(const EngineLayout& layout, std::int64_t part_bytes, LaneView* view);

// Sets the view's addresses. Those of LaneView::symmetric [R] are stored in `symmetric`. `memory`: of this
// lane.
void place_engine_lane(const EngineLayout& layout, std::byte* memory, LaneView* view,
                       std::span<std::byte*> symmetric);

}  // namespace ferry::cuda
