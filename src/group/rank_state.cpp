#include "group/rank_state.hpp"

#include <unistd.h>

#include <utility>

#include "base/callback_thread.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "group/bootstrap_plane.hpp"
#include "group/shared_memory_plane.hpp"

namespace ferry {

RankState::RankState(Membership membership, double deadline, std::shared_ptr<Engine> engine)
    : control_(std::move(membership.control)),
      rank_(membership.rank),
      topology_(std::move(membership.topology)),
      deadline_(deadline),
      engine_(std::move(engine)),
      one_host_(membership.link == nullptr),
      waiter_(*control_, rank_,
              one_host_ ? topology_.ranks()
                        : static_cast<int>(topology_.ranks_of(topology_.node_of(rank_)).size())) {
  if (one_host_) {
    plane_ = std::make_unique<SharedMemoryPlane>(*control_, waiter_, rank_, deadline);
  } else {
    plane_ = std::make_unique<BootstrapPlane>(*control_, waiter_, rank_, topology_, deadline,
                                              std::move(membership.link));
  }
  control_->join(rank_);
  all_gather(nullptr, nullptr, 0);
  for (int peer = 0; peer < control_->ranks(); ++peer)
    same_process_ &= control_->process_of(peer) == getpid();
  if (!same_process_) liveness_lock_.emplace(control_->liveness_lock(rank_));
  if (log_enabled()) {
    log_line(str("rank ", rank_, " of ", topology_.ranks(), " has joined: process ", getpid(),
                 ", local rank ", topology_.local_rank_of(rank_), " of node ", topology_.node_of(rank_),
                 ", nodes ", topology_.nodes(), topology_.simulated() ? " (simulated)" : ""));
  }
}

void RankState::all_gather(const void* mine, void* all, std::size_t bytes) {
  require_own_process("rank");
  CallbackScope::require_none("a collective of the group");
  plane_->all_gather(mine, all, bytes);
}

}  // namespace ferry
