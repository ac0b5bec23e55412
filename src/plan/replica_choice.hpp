// Which replica each route of a call takes (Placement::replicas), for the host and for kernels. An exchange
// inside has the P replicas as its experts; the choice turns a caller's ids into its ids.
#pragma once

#include <cstdint>

#include "ferry/placement.hpp"
#include "plan/slot.hpp"

namespace ferry {

// Number, in [0, P), of the replica that a route to `expert` takes. `first` [E + 1]: number of an expert's
// first replica.
template <class First>
FERRY_HD std::int32_t chosen_replica(const First* first, std::int32_t expert, const RouteOrigin& route) {
  const std::uint32_t begin = first[expert], replicas = first[expert + 1] - begin;
  return static_cast<std::int32_t>(begin + hash32(route) % replicas);
}

// Ids that are no expert's stay that inside, where there are `more` = P - E experts more. One near 2^63
// becomes smaller.
FERRY_HD constexpr std::int64_t id_inside(std::int64_t id, std::int32_t more) {
  const std::int64_t most = INT64_MAX - more;
  if (id < 0) return id;
  return (id < most ? id : most) + more;
}
FERRY_HD constexpr std::int64_t id_outside(std::int64_t inside, std::int32_t more) {
  return inside < 0 ? inside : inside - more;
}

// The choice for all routes of a call, and the scales of the replicas.
struct ReplicaChoice {
  const void* ids;                    // [N, K]
  bool wide_ids;                      // int64
  std::int32_t tokens;                // N; with device_tokens the most it may be
  const std::int32_t* device_tokens;  // or null
  std::int32_t source;                // of the tokens; 0 with replicated input
  std::int32_t top_k, experts, replicas;
  const std::int32_t* first;  // [E + 1] number of an expert's first replica
  std::int64_t* chosen;       // [N, K]

  const float* scales;            // [E + S]
  std::int32_t scale_count;       // P + S; 0: no scales
  const std::int32_t* expert_of;  // [P + S] by replica, then by shared expert
  float* chosen_scales;           // [P + S]

  // K times N. Of an N out of range, which the dispatch inside refuses, nothing is chosen.
  FERRY_HD std::int32_t routes() const {
    if (device_tokens == nullptr) return tokens * top_k;
    const std::int32_t count = *device_tokens;
    return count >= 0 && count <= tokens ? count * top_k : 0;
  }
  FERRY_HD void choose(std::int32_t route) const {
    const std::int64_t id = wide_ids ? static_cast<const std::int64_t*>(ids)[route]
                                     : static_cast<const std::int32_t*>(ids)[route];
    if (classify_id(id, experts) != IdKind::expert) {
      chosen[route] = id_inside(id, replicas - experts);
      return;
    }
    const int token = route / top_k;
    chosen[route] = chosen_replica(first, static_cast<std::int32_t>(id),
                                   {.token = token, .source = source, .slot = route - token * top_k});
  }
  FERRY_HD void choose_scale(std::int32_t i) const { chosen_scales[i] = scales[expert_of[i]]; }
  // Every `step`-th route and scale from `begin` on.
  FERRY_HD void choose_share(std::int32_t begin, std::int32_t step) const {
    const std::int32_t count = routes();
    for (std::int32_t route = begin; route < count; route += step) choose(route);
    for (std::int32_t i = begin; i < scale_count; i += step) choose_scale(i);
  }
};

}  // namespace ferry
