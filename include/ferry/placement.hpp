// The table that says which rank holds which expert.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ferry {

/// Where an expert is: local expert `local` of rank `rank`.
struct ExpertLocation {
  int rank = 0;
  int local = 0;  ///< 0 to L - 1; rows on the rank are in the order of this number

  friend bool operator==(const ExpertLocation&, const ExpertLocation&) = default;
};

/// Where a route begins: a slot of a token of a rank.
struct RouteOrigin {
  int token = 0;
  int source = 0;  ///< the token's rank; 0 with Config::input replicated, so that every rank chooses alike
  int slot = 0;
};

/// The hash by which routes choose between the replicas of an expert: see docs/contract.md. For the host and
/// for kernels.
#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr std::uint32_t
    hash32(const RouteOrigin& route) {
  std::uint32_t x = static_cast<std::uint32_t>(route.token) * 0x9e3779b1u +
                    static_cast<std::uint32_t>(route.source) * 0x85ebca77u +
                    static_cast<std::uint32_t>(route.slot) * 0xc2b2ae3du;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

/// The location of each of E experts on R ranks.
///
/// Ranks may hold different numbers of experts, or none. The local numbers of a rank are 0, 1, 2, ... without
/// gaps. An expert may have replicas: it then lives on several ranks, at most once on each. Immutable; copies
/// carry the version along. Thread-safe.
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

  /// Experts with replicas. `experts_of_rank` [R][L]: entry r lists the experts of rank r in local order. E
  /// is `experts`. docs/contract.md says which replica a route takes, and what a call then returns.
  /// @throws UsageError  no rank or expert, an expert outside [0, experts), one that no rank holds, or one
  /// twice on a rank
  static Placement replicas(std::vector<std::vector<int>> experts_of_rank, int experts,
                            std::uint64_t version = 0);

  /// E
  int experts() const { return has_replicas() ? static_cast<int>(first_.size()) - 1 : total_replicas(); }
  int ranks() const { return ranks_; }  ///< R
  int tp() const { return tp_; }        ///< slices of each expert; 1 unless made by ep_tp()
  std::uint64_t version() const { return version_; }
  bool empty() const { return locations_.empty(); }

  /// Location of `expert`, which must be in [0, E). ep_tp: of its slice 0. With replicas: of the first one.
  ExpertLocation location(int expert) const { return locations_[first_replica(expert)]; }
  /// Location of the replica that a route to `expert` takes: number hash32(route) % m of its m replicas.
  ExpertLocation location(int expert, const RouteOrigin& route) const {
    return locations_[static_cast<std::size_t>(replica(expert, route))];
  }
  /// Locations of all experts, [E]. With replicas [P], where P = total_replicas(): ordered by expert, then by
  /// rank.
  const std::vector<ExpertLocation>& locations() const { return locations_; }

  /// Whether an expert lives on several ranks.
  bool has_replicas() const { return !first_.empty(); }
  /// P: replicas of all experts together, of which an expert on one rank has one. Without replicas E.
  int total_replicas() const { return static_cast<int>(locations_.size()); }
  /// Locations of all replicas of `expert`, ascending by rank, [m].
  std::span<const ExpertLocation> replicas_of(int expert) const {
    const std::size_t first = first_replica(expert);
    return {locations_.data() + first, has_replicas() ? first_replica(expert + 1) - first : 1};
  }
  /// Number, in [0, P), of the replica that a route to `expert` takes. Without replicas `expert`.
  int replica(int expert, const RouteOrigin& route) const {
    if (!has_replicas()) return expert;
    const std::size_t first = first_replica(expert), replicas = first_replica(expert + 1) - first;
    return static_cast<int>(first + hash32(route) % replicas);
  }

  /// L: experts of `rank`, which must be in [0, R).
  int local_experts(int rank) const {
    return static_cast<int>(by_rank_[static_cast<std::size_t>(rank)].size());
  }
  /// The largest L of any rank.
  int most_local_experts() const { return most_local_; }
  /// Global ids of the experts of `rank` in local order, [L].
  const std::vector<int>& experts_of(int rank) const { return by_rank_[static_cast<std::size_t>(rank)]; }

  friend bool operator==(const Placement& a, const Placement& b) {
    return a.ranks_ == b.ranks_ && a.tp_ == b.tp_ && a.version_ == b.version_ &&
           a.locations_ == b.locations_ && a.first_ == b.first_;
  }

 private:
  std::size_t first_replica(int expert) const {
    const auto e = static_cast<std::size_t>(expert);
    return has_replicas() ? static_cast<std::size_t>(first_[e]) : e;
  }

  int ranks_ = 0;
  int tp_ = 1;
  int most_local_ = 0;
  std::uint64_t version_ = 0;
  std::vector<ExpertLocation> locations_;  // [P]
  std::vector<int> first_;  // [E + 1] an expert's first entry in locations_; empty: no replicas
  std::vector<std::vector<int>> by_rank_;  // [R][L]: global ids
};

}  // namespace ferry
