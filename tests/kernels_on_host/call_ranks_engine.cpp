// Calls over an engine: what EngineCarrier has carried between the phases of a call, and what the short
// kernels beside it do.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <cstring>

#include "backends/cuda/combine/packed_rows.cuh"
#include "backends/cuda/protocol/peer_messages.cuh"
#include "kernels_on_host/call_ranks.hpp"

namespace ferry::cuda {

// As the constructor of ExchangeState.
void CallRanks::place_lanes() {
  for (int r = 0; r < size(); ++r) {
    Rank& rank = ranks_[static_cast<std::size_t>(r)];
    rank.engine = engine_layout(config_, *topology_, r);
    rank.engine_memory = of_bytes(rank.engine.bytes, std::byte{0});
    place_engine_lane(rank.engine, at(rank.engine_memory), &rank.view, rank.sections);
    place_sections(rank.sections, &rank.view);
  }
}

// As EngineCarrier::deliver_headers(): this rank's own header lies where it awaits it.
void CallRanks::carry_headers() {
  for (int from = 0; from < size(); ++from) {
    const EngineLayout& layout = ranks_[static_cast<std::size_t>(from)].engine;
    for (int to = 0; to < size(); ++to) {
      if (to == from) continue;
      std::memcpy(
          at(ranks_[static_cast<std::size_t>(to)].engine_memory) + layout.inbox + from * layout.block_bytes,
          at(ranks_[static_cast<std::size_t>(from)].engine_memory) + layout.outbox + to * layout.block_bytes,
          static_cast<std::size_t>(layout.header_bytes));
    }
  }
}

// As the calls of an EngineCarrier between the phases of a dispatch, and mark_arrived_kernel.
void CallRanks::carry_messages(const std::vector<DispatchArguments>& calls, const CallForm& form) {
  carry_headers();
  for (int from = 0; from < size(); ++from) {
    Rank& source = ranks_[static_cast<std::size_t>(from)];
    const DispatchArguments& call = calls[static_cast<std::size_t>(from)];
    const EngineLayout& layout = source.engine;
    for (int to = 0; to < size(); ++to) {
      if (to == from) continue;
      Rank& destination = ranks_[static_cast<std::size_t>(to)];
      const std::byte* block = at(source.engine_memory) + layout.outbox + to * layout.block_bytes;
      const int word = source.view.signals.first_messages + to;
      LLPacket counts;
      std::memcpy(&counts, block + (kHeaderCounts + word / 2) * sizeof counts, sizeof counts);
      auto messages = static_cast<std::int32_t>(counts.word >> (32 * (word % 2)));
      if (form.by_plan) messages = call.plan.tokens_between[from * size() + to];
      ASSERT_GE(messages, 0);
      ASSERT_LE(messages, config_.max_tokens);
      std::byte* arrived =
          at(destination.engine_memory) + layout.inbox + from * layout.block_bytes + layout.header_bytes;
      std::memcpy(arrived, block + layout.header_bytes,
                  static_cast<std::size_t>(messages) * static_cast<std::size_t>(call.message.bytes));
      // The places of messages depend on the call's format, which only its view knows.
      const LaneView& view = calls[static_cast<std::size_t>(to)].lane;
      const std::uint64_t number = destination.state.calls[0] + 1;
      for (std::int32_t i = 0; i < messages; ++i) {
        EXPECT_EQ(memory::slot_metadata(view, to, 0, from, i)->call >> SlotMetadata::kTokenBits, number);
        for (int quarter = 0; quarter < kQuarters; ++quarter)
          memory::dispatch_flags(view, to, 0, from, i)[quarter].value = number;
      }
    }
  }
}

// As the calls of an EngineCarrier between the phases of a combine, and find_rows_kernel.
void CallRanks::carry_rows(const std::vector<CombineArguments>& calls) {
  carry_headers();
  for (int from = 0; from < size(); ++from) {
    const auto& packed = calls[static_cast<std::size_t>(from)].packed;
    const std::byte* row = packed.outbox;
    for (int to = 0; to < size(); ++to) {
      Rank& destination = ranks_[static_cast<std::size_t>(to)];
      const std::uint64_t number = destination.state.calls[0] + 1;
      auto* const arrived =
          reinterpret_cast<LLPacket*>(at(destination.engine_memory) + destination.engine.arrived);
      if (to == from && !calls[static_cast<std::size_t>(from)].own_staged) {
        row += packed.rows[to] * packed.row_bytes;  // their place, which nobody fills
        continue;
      }
      for (std::int32_t i = 0; i < packed.rows[to]; ++i, row += packed.row_bytes) {
        std::uint64_t label = 0;
        std::memcpy(&label, row + packed.label_offset, sizeof label);
        const auto index = static_cast<std::int32_t>(label);
        ASSERT_GE(index, 0);
        ASSERT_LT(index, destination.engine.received_rows);
        ASSERT_EQ(label, packed_label(number, index)) << "row " << i << " from rank " << from;
        arrived[index] = {number, reinterpret_cast<std::uint64_t>(row)};
        set_row_flags(destination.view, index, number);
      }
    }
    ASSERT_LE(row, packed.outbox + packed.most_rows * packed.row_bytes);
  }
}

}  // namespace ferry::cuda
