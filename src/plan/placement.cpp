#include "ferry/placement.hpp"

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

Placement Placement::blocks(int experts, int ranks) {
  if (experts < 1 || ranks < 1) {
    throw UsageError(str("placement: needs at least one expert and one rank, got ",
                         counted(experts, "expert"), " on ", counted(ranks, "rank")));
  }
  std::vector<ExpertLocation> locations;
  locations.reserve(static_cast<std::size_t>(experts));
  for (int rank = 0; rank < ranks; ++rank) {
    const int local_experts = experts / ranks + (rank < experts % ranks ? 1 : 0);
    for (int local = 0; local < local_experts; ++local) locations.push_back({rank, local});
  }
  return table(std::move(locations), ranks);
}

Placement Placement::table(std::vector<ExpertLocation> locations, int ranks, std::uint64_t version) {
  if (locations.empty() || ranks < 1) {
    throw UsageError(str("placement: needs at least one expert and one rank, got ",
                         counted(locations.size(), "expert"), " on ", counted(ranks, "rank")));
  }
  std::vector<int> local_experts(static_cast<std::size_t>(ranks), 0);
  for (std::size_t e = 0; e < locations.size(); ++e) {
    if (locations[e].rank < 0 || locations[e].rank >= ranks) {
      throw UsageError(
          str("placement: expert ", e, " is on rank ", locations[e].rank, ", must be 0 to ", ranks - 1));
    }
    ++local_experts[static_cast<std::size_t>(locations[e].rank)];
  }
  Placement placement;
  placement.ranks_ = ranks;
  placement.version_ = version;
  for (const int count : local_experts) {
    placement.by_rank_.emplace_back(static_cast<std::size_t>(count), -1);
    placement.most_local_ = std::max(placement.most_local_, count);
  }
  for (std::size_t e = 0; e < locations.size(); ++e) {
    auto& experts = placement.by_rank_[static_cast<std::size_t>(locations[e].rank)];
    const int local = locations[e].local;
    if (local < 0 || local >= static_cast<int>(experts.size())) {
      throw UsageError(str("placement: expert ", e, " is local expert ", local, " of rank ",
                           locations[e].rank, ", which holds ", experts.size(),
                           ": its local experts must be 0 to ", static_cast<int>(experts.size()) - 1,
                           " without gaps"));
    }
    int& expert = experts[static_cast<std::size_t>(local)];
    if (expert >= 0) {
      throw UsageError(str("placement: experts ", expert, " and ", e, " are both local expert ", local,
                           " of rank ", locations[e].rank));
    }
    expert = static_cast<int>(e);
  }
  placement.locations_ = std::move(locations);
  return placement;
}

Placement Placement::ep_tp(int experts, int ep, int tp) {
  if (experts < 1 || ep < 1 || tp < 1 || experts % ep != 0) {
    throw UsageError(str("placement: ep_tp of ", counted(experts, "expert"), ", ep = ", ep, ", tp = ", tp,
                         ": all must be 1 or more, and ep must divide the experts"));
  }
  std::vector<ExpertLocation> locations;
  for (int e = 0; e < experts; ++e) locations.push_back({e / (experts / ep) * tp, e % (experts / ep)});
  Placement placement = table(std::move(locations), ep * tp);
  placement.tp_ = tp;
  for (int rank = 0; rank < ep * tp; ++rank)
    placement.by_rank_[static_cast<std::size_t>(rank)] =
        placement.by_rank_[static_cast<std::size_t>(rank / tp * tp)];
  return placement;
}

}  // namespace ferry
