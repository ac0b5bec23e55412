// The table that says which rank holds which expert.
#pragma once

#include <cstdint>
#include <vector>

namespace ferry {

/// Where an expert is: local expert `local` of rank `rank`.
struct ExpertLocation {
  int rank = 0;
  int local = 0;  ///< 0 to L - 1; rows on the rank are in the order of this number

  friend bool operator==(const ExpertLocation&, const ExpertLocation&) = default;
};

/// The location of each of E experts on R ranks.
///
/// Ranks may hold different numbers of experts, or none. The local numbers of a rank are 0, 1, 2, ... without
/// gaps. Immutable; copies carry the version along. Thread-safe.
class Placement {
 public:
  /// No experts and no ranks. In Config it stands for `blocks(experts, ranks)`.
  Placement() = default;

  /// Consecutive experts on each rank. The first E % R ranks hold one expert more than the others.
  /// @throws UsageError  `experts` or `ranks` below 1
  static Placement blocks(int experts, int ranks);

  /// `locations` [E]: entry e is where expert e is. `version` is the caller's own number; plans report it.
  /// @throws UsageError  a rank outside [0, ranks), two experts at one location, or a gap in the local
  /// numbers
  static Placement table(std::vector<ExpertLocation> locations, int ranks, std::uint64_t version = 0);

  /// Experts sliced by tensor parallelism, on R = ep * tp ranks: each is on `tp` consecutive ranks, a
  /// sub-group, and each of these holds a slice of it. Slice i of expert e is on rank e / (E / ep) * tp + i.
  /// The ranks of a sub-group pass the same tokens. docs/guides/tensor_parallel.md says how calls behave.
  /// @throws UsageError  a number below 1, or `ep` does not divide `experts`
  static Placement ep_tp(int experts, int ep, int tp);

  int experts() const { return static_cast<int>(locations_.size()); }  ///< E
  int ranks() const { return ranks_; }                                 ///< R
  int tp() const { return tp_; }  ///< slices of each expert; 1 unless made by ep_tp()
  std::uint64_t version() const { return version_; }
  bool empty() const { return locations_.empty(); }

  /// Location of `expert`, which must be in [0, E). ep_tp: of its slice 0.
  ExpertLocation location(int expert) const { return locations_[static_cast<std::size_t>(expert)]; }
  /// Locations of all experts, [E].
  const std::vector<ExpertLocation>& locations() const { return locations_; }

  /// L: experts of `rank`, which must be in [0, R).
  int local_experts(int rank) const {
    return static_cast<int>(by_rank_[static_cast<std::size_t>(rank)].size());
  }
  /// The largest L of any rank.
  int most_local_experts() const { return most_local_; }
  /// Global ids of the experts of `rank` in local order, [L].
  const std::vector<int>& experts_of(int rank) const { return by_rank_[static_cast<std::size_t>(rank)]; }

  friend bool operator==(const Placement& a, const Placement& b) {
    return a.ranks_ == b.ranks_ && a.tp_ == b.tp_ && a.version_ == b.version_ && a.locations_ == b.locations_;
  }

 private:
  int ranks_ = 0;
  int tp_ = 1;
  int most_local_ = 0;
  std::uint64_t version_ = 0;
  std::vector<ExpertLocation> locations_;  // [E]
  std::vector<std::vector<int>> by_rank_;  // [R][L]: global ids
};

}  // namespace ferry
