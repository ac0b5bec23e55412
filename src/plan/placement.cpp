#include "ferry/placement.hpp"

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

Placement Placement::blocks(int experts, int ranks) {
  if (experts < 1 || ranks < 1) {
    throw UsageError(str("placement: needs at least one expert and one rank, got ", experts, " experts on ",
                         ranks, " ranks"));
  }
  std::vector<ExpertLocation> places;
  places.reserve(static_cast<std::size_t>(experts));
  for (int rank = 0; rank < ranks; ++rank) {
    const int held = experts / ranks + (rank < experts % ranks ? 1 : 0);
    for (int local = 0; local < held; ++local) places.push_back({rank, local});
  }
  return table(std::move(places), ranks);
}

Placement Placement::table(std::vector<ExpertLocation> places, int ranks, std::uint64_t version) {
  if (places.empty() || ranks < 1) {
    throw UsageError(str("placement: needs at least one expert and one rank, got ", places.size(),
                         " experts on ", ranks, " ranks"));
  }
  std::vector<int> held(static_cast<std::size_t>(ranks), 0);
  for (std::size_t e = 0; e < places.size(); ++e) {
    if (places[e].rank < 0 || places[e].rank >= ranks) {
      throw UsageError(
          str("placement: expert ", e, " is on rank ", places[e].rank, ", there are ", ranks, " ranks"));
    }
    ++held[static_cast<std::size_t>(places[e].rank)];
  }
  Placement placement;
  placement.ranks_ = ranks;
  placement.version_ = version;
  for (const int count : held) {
    placement.by_rank_.emplace_back(static_cast<std::size_t>(count), -1);
    placement.most_local_ = std::max(placement.most_local_, count);
  }
  for (std::size_t e = 0; e < places.size(); ++e) {
    auto& experts = placement.by_rank_[static_cast<std::size_t>(places[e].rank)];
    const int local = places[e].local;
    if (local < 0 || local >= static_cast<int>(experts.size())) {
      throw UsageError(str("placement: expert ", e, " is local expert ", local, " of rank ", places[e].rank,
                           ", which holds ", experts.size(), ": its local experts must be 0 to ",
                           static_cast<int>(experts.size()) - 1, " without a hole"));
    }
    int& slot = experts[static_cast<std::size_t>(local)];
    if (slot >= 0) {
      throw UsageError(str("placement: experts ", slot, " and ", e, " are both local expert ", local,
                           " of rank ", places[e].rank));
    }
    slot = static_cast<int>(e);
  }
  placement.locations_ = std::move(places);
  return placement;
}

}  // namespace ferry
