#include "group/rank_state.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace ferry {

RankState::RankState(std::shared_ptr<GroupControl> control, int rank, Topology topology, double deadline)
    : control_(std::move(control)),
      rank_(rank),
      topology_(topology),
      deadline_(deadline),
      waiter_(*control_, rank, topology.ranks()) {
  control_->enter(rank);
  all_gather(nullptr, nullptr, 0);
  for (int peer = 0; peer < control_->ranks(); ++peer)
    same_process_ &= control_->process_of(peer) == getpid();
  if (!same_process_) lock_.emplace(control_->lock(rank));
}

void RankState::all_gather(const void* mine, void* all, std::size_t bytes) {
  if (control_->failed())
    control_->throw_failure({Operation::barrier, step_ + 1, rank_, -1, step_ + 1, step_});
  const auto* from = static_cast<const std::byte*>(mine);
  auto* to = static_cast<std::byte*>(all);
  std::size_t done = 0;
  do {
    const std::size_t part = std::min(bytes - done, GatherSlot::kSlotBytes);
    gather_step(from + done, to + done, part, bytes);
    done += part;
  } while (done < bytes);
}

// Two slots suffice: a rank writes step n+2 after it has seen every peer's n+1, which follows the peer's
// reads of n.
void RankState::gather_step(const std::byte* mine, std::byte* all, std::size_t bytes, std::size_t stride) {
  const std::uint64_t step = ++step_;
  const std::size_t slot = step & 1;
  GatherSlot& seat = control_->seat(rank_);
  if (bytes > 0) std::memcpy(seat.slots[slot], mine, bytes);
  // Release: orders the slot before the step.
  seat.step.store(step, std::memory_order_seq_cst);
  for (int peer = 0; peer < control_->ranks(); ++peer) {
    if (peer != rank_) control_->bell(peer).ring();
  }
  for (int peer = 0; peer < control_->ranks(); ++peer) {
    const GatherSlot& theirs = control_->seat(peer);
    wait({&theirs.step}, {Operation::barrier, step, rank_, peer, step, 0}, deadline_);
    if (bytes > 0) std::memcpy(all + peer * stride, theirs.slots[slot], bytes);
  }
}

}  // namespace ferry
