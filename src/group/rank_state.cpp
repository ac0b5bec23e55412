#include "group/rank_state.hpp"

#include <unistd.h>

#include <utility>

#include "base/callback_scope.hpp"
#include "group/shared_memory_plane.hpp"

namespace ferry {

RankState::RankState(std::shared_ptr<ControlBlock> control, int rank, Topology topology, double deadline,
                     std::shared_ptr<Engine> engine)
    : control_(std::move(control)),
      rank_(rank),
      topology_(std::move(topology)),
      deadline_(deadline),
      engine_(std::move(engine)),
      waiter_(*control_, rank, topology_.ranks()),
      plane_(std::make_unique<SharedMemoryPlane>(*control_, waiter_, rank, deadline)) {
  control_->join(rank);
  all_gather(nullptr, nullptr, 0);
  for (int peer = 0; peer < control_->ranks(); ++peer)
    same_process_ &= control_->process_of(peer) == getpid();
  if (!same_process_) liveness_lock_.emplace(control_->liveness_lock(rank));
}

void RankState::all_gather(const void* mine, void* all, std::size_t bytes) {
  CallbackScope::require_none("a collective of the group");
  plane_->all_gather(mine, all, bytes);
}

}  // namespace ferry
