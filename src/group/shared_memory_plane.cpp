#include "group/shared_memory_plane.hpp"

#include <algorithm>
#include <cstring>

namespace ferry {

void SharedMemoryPlane::all_gather(const void* mine, void* all, std::size_t bytes) {
  if (control_.failed()) control_.throw_failure({Operation::barrier, step_ + 1, rank_, -1, step_ + 1, step_});
  const auto* in = static_cast<const std::byte*>(mine);
  auto* out = static_cast<std::byte*>(all);
  std::size_t done = 0;
  do {
    const std::size_t part = std::min(bytes - done, GatherSlot::kPartBytes);
    gather_part(in + done, out + done, part, bytes);
    done += part;
  } while (done < bytes);
}

// Two buffers are enough: a rank writes step n+2 after it has seen step n+1 of every peer, and a peer stores
// n+1 only after it has read the parts of n.
void SharedMemoryPlane::gather_part(const std::byte* mine, std::byte* all, std::size_t bytes,
                                    std::size_t stride) {
  const std::uint64_t step = ++step_;
  const std::size_t parity = step & 1;
  GatherSlot& own_slot = control_.gather_slot(rank_);
  if (bytes > 0) std::memcpy(own_slot.parts[parity], mine, bytes);
  // Release: orders the part before the step. Sequentially consistent because WakeEvent requires it.
  own_slot.step.store(step, std::memory_order_seq_cst);
  for (int peer = 0; peer < control_.ranks(); ++peer) {
    if (peer != rank_) control_.wake_event(peer).ring();
  }
  const WaitLimit limit{.seconds = deadline_};
  for (int peer = 0; peer < control_.ranks(); ++peer) {
    const GatherSlot& slot = control_.gather_slot(peer);
    waiter_.wait({&slot.step}, {Operation::barrier, step, rank_, peer, step, 0}, limit);
    if (bytes > 0) std::memcpy(all + peer * stride, slot.parts[parity], bytes);
  }
}

}  // namespace ferry
