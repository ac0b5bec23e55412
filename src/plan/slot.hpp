// What becomes of one slot of a token: the one classification, for the host planner and for kernels.
#pragma once

#include <cstdint>

#include "layout/host_device.hpp"

namespace ferry {

// Kinds with a destination come last: has_destination() compares.
enum class SlotKind : std::uint8_t {
  masked,  // id -1: the token has no expert in this slot
  bad,     // any other id that is no expert: skipped like a masked slot, and reported
  local,   // the expert is on the given rank
  remote,  // the expert is on another rank
};

FERRY_HD constexpr bool has_destination(SlotKind kind) {
  return kind >= SlotKind::local;
}

// Classifies the slot with expert id `id`, as seen from `rank`, when there are `experts` experts.
// rank_of(std::int32_t expert) returns the expert's rank; it is called for valid ids only, so it may also store what it
// looks up.
FERRY_HD_CALLS_ARGUMENT
template <class RankOf>
FERRY_HD SlotKind classify_slot(std::int64_t id, std::int32_t experts, std::int32_t rank,
                                          RankOf rank_of) {
  if (id < 0 || id >= experts) return id == -1 ? SlotKind::masked : SlotKind::bad;
  return rank_of(static_cast<std::int32_t>(id)) == rank ? SlotKind::local : SlotKind::remote;
}

}  // namespace ferry
