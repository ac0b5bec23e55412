#include "ferry/placement.hpp"

#include <algorithm>
#include <utility>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace {

void check_numbers(std::int64_t experts, std::int64_t ranks) {
  if (experts > 0 && ranks > 0) return;
  throw UsageError(str("placement: needs at least one expert and one rank, got ", counted(experts, "expert"),
                       " on ", counted(ranks, "rank")));
}

}  // namespace

Placement Placement::blocks(int experts, int ranks) {
  check_numbers(experts, ranks);
  std::vector<ExpertLocation> locations;
  locations.reserve(static_cast<std::size_t>(experts));
  for (int rank = 0; rank < ranks; ++rank) {
    const int local_experts = experts / ranks + (rank < experts % ranks ? 1 : 0);
    for (int local = 0; local < local_experts; ++local) locations.push_back({rank, local});
  }
  return table(std::move(locations), ranks);
}

Placement Placement::table(std::vector<ExpertLocation> locations, int ranks, std::uint64_t version) {
  check_numbers(static_cast<std::int64_t>(locations.size()), ranks);
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

Placement Placement::replicas(std::vector<std::vector<int>> experts_of_rank, int experts,
                              std::uint64_t version) {
  check_numbers(experts, static_cast<std::int64_t>(experts_of_rank.size()));
  std::vector<std::vector<ExpertLocation>> replicas(static_cast<std::size_t>(experts));
  Placement placement;
  for (std::size_t rank = 0; rank < experts_of_rank.size(); ++rank) {
    const std::vector<int>& held = experts_of_rank[rank];
    for (std::size_t local = 0; local < held.size(); ++local) {
      const int expert = held[local];
      if (expert < 0 || expert >= experts) {
        throw UsageError(str("placement: local expert ", local, " of rank ", rank, " is expert ", expert,
                             ", must be 0 to ", experts - 1));
      }
      std::vector<ExpertLocation>& found = replicas[static_cast<std::size_t>(expert)];
      const ExpertLocation location{static_cast<int>(rank), static_cast<int>(local)};
      if (!found.empty() && found.back().rank == location.rank) {
        throw UsageError(str("placement: rank ", rank, " holds expert ", expert,
                             " twice, as its local experts ", found.back().local, " and ", local,
                             ": an expert may be once on a rank"));
      }
      found.push_back(location);
    }
    placement.most_local_ = std::max(placement.most_local_, static_cast<int>(held.size()));
  }
  placement.first_.push_back(0);
  for (std::size_t e = 0; e < replicas.size(); ++e) {
    if (replicas[e].empty()) throw UsageError(str("placement: no rank holds expert ", e));
    placement.locations_.insert(placement.locations_.end(), replicas[e].begin(), replicas[e].end());
    placement.first_.push_back(static_cast<int>(placement.locations_.size()));
  }
  if (placement.total_replicas() == experts) placement.first_.clear();  // as table() makes it
  placement.ranks_ = static_cast<int>(experts_of_rank.size());
  placement.version_ = version;
  placement.by_rank_ = std::move(experts_of_rank);
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
