#include "backends/cpu/link/shared_link.hpp"

namespace ferry::cpu {

SharedLink::SharedLink(const Rank& rank, const SymmetricMemory& memory, const ExchangeLayout& layout,
                       int lane, std::int64_t summary_bytes, double deadline)
    : memory_(memory),
      layout_(layout),
      lane_(lane),
      rank_(rank.index()),
      ranks_(rank.size()),
      channel_(rank, memory.sections(layout.signals_of(lane)), summary_bytes, deadline) {}

// The staging of rank `at` in the buffer of the current call. Combine's rows are placed by token, whichever
// rank writes them.
std::byte* SharedLink::staged(Staging staging, int at, int source) const {
  const int parity = channel_.parity();
  const std::int64_t offset = staging == Staging::dispatch ? layout_.messages_of(lane_, parity, source)
                                                           : layout_.combine_of(lane_, parity);
  return memory_.at(at, offset);
}

void SharedLink::post(bool) {
  for (int step = 1; step <= ranks_; ++step) channel_.post((rank_ + step) % ranks_);
}

void SharedLink::wait() {
  for (int step = 0; step < ranks_; ++step) channel_.wait((rank_ + step) % ranks_);
}

void SharedLink::post_chunk(std::int64_t chunk) {
  for (int step = 1; step < ranks_; ++step) channel_.post_chunk((rank_ + step) % ranks_, chunk);
}

}  // namespace ferry::cpu
