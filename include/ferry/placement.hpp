// Which rank holds which expert.
#pragma once

#include <cstdint>
#include <vector>

namespace ferry {

struct ExpertLocation {
  int rank = 0;
  int local = 0;  // number of the expert on its rank: the order of its rows there

  friend bool operator==(const ExpertLocation&, const ExpertLocation&) = default;
};

// The table expert -> (rank, local expert): any table in which the local experts of every rank are
// 0, 1, 2, ... Ranks may hold different numbers of experts, or none. Immutable; copied with its version.
class Placement {
 public:
  Placement() = default;

  // Blocks of neighbouring experts: the first experts % ranks ranks hold one more than the others.
  static Placement blocks(int experts, int ranks);

  // Any table. Throws UsageError for a rank outside [0, ranks), two experts at one (rank, local expert) and
  // holes.
  static Placement table(std::vector<ExpertLocation> places, int ranks, std::uint64_t version = 0);

  int experts() const { return static_cast<int>(places_.size()); }
  int ranks() const { return ranks_; }
  std::uint64_t version() const { return version_; }
  bool empty() const { return places_.empty(); }

  ExpertLocation place(int expert) const { return places_[static_cast<std::size_t>(expert)]; }
  const std::vector<ExpertLocation>& places() const { return places_; }

  int local_experts(int rank) const {
    return static_cast<int>(by_rank_[static_cast<std::size_t>(rank)].size());
  }
  int most_local_experts() const { return most_local_; }
  // The global ids of a rank's experts, in local order.
  const std::vector<int>& experts_of(int rank) const { return by_rank_[static_cast<std::size_t>(rank)]; }

  friend bool operator==(const Placement& a, const Placement& b) {
    return a.ranks_ == b.ranks_ && a.version_ == b.version_ && a.places_ == b.places_;
  }

 private:
  int ranks_ = 0;
  int most_local_ = 0;
  std::uint64_t version_ = 0;
  std::vector<ExpertLocation> places_;
  std::vector<std::vector<int>> by_rank_;
};

}  // namespace ferry
