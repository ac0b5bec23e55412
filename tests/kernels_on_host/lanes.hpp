// The lanes of some ranks in host memory, as the kernels of a Grid see them.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "backends/cuda/protocol/lane_view.hpp"
#include "group/control_block.hpp"

namespace ferry::cuda {

class HostLanes {
 public:
  // Each rank stages `max_tokens` messages of `message_bytes` for a pair.
  HostLanes(int ranks, std::int32_t max_tokens, std::int64_t message_bytes) {
    constexpr std::int32_t kExperts = 4, kTopK = 2;
    const DeviceSignals signals = DeviceSignals::of({ranks, kExperts, max_tokens, kTopK, max_tokens, 64});
    const ExchangeLayout layout = exchange_layout({.ranks = ranks,
                                                   .top_k = kTopK,
                                                   .max_tokens = max_tokens,
                                                   .lanes = 1,
                                                   .signal_bytes = signals.bytes,
                                                   .message_bytes = message_bytes,
                                                   .combine_row_bytes = 64,
                                                   .combine_rows = max_tokens});
    for (int r = 0; r < ranks; ++r) {
      Memory& memory = memory_.emplace_back();
      memory.symmetric.resize(static_cast<std::size_t>(layout.lane_bytes() / 16));
      LaneView& view = views_.emplace_back();
      view.rank = r;
      view.ranks = ranks;
      view.max_tokens = max_tokens;
      view.deadline = ~std::uint64_t{0};
      view.signals = signals;
      view.exchange = layout;
      view.state = &memory.state;
      view.epoch = &memory.epoch;
      view.timeout_claimed = &memory.timeout_claimed;
      view.report = &memory.report;
      view.device_error = &memory.error;
      view.state->diagnostics = DeviceDiagnostics::none();
    }
    for (LaneView& view : views_) {
      for (int peer = 0; peer < ranks; ++peer)
        view.symmetric[peer] =
            reinterpret_cast<std::byte*>(memory_[static_cast<std::size_t>(peer)].symmetric.data());
    }
  }

  const LaneView& view(int rank) const { return views_[static_cast<std::size_t>(rank)]; }
  LaneState& state(int rank) { return memory_[static_cast<std::size_t>(rank)].state; }
  DeviceError& error(int rank) { return memory_[static_cast<std::size_t>(rank)].error; }

 private:
  struct alignas(16) Line {
    std::byte bytes[16];
  };
  struct Memory {
    std::vector<Line> symmetric;
    LaneState state{};
    Epoch epoch{.number = kFirstEpoch, .row_order_hash = 0, .placement_version = 0};
    unsigned timeout_claimed = 0;
    HostSignals report{};
    DeviceError error{};
  };

  std::deque<Memory> memory_;
  std::deque<LaneView> views_;
};

}  // namespace ferry::cuda
