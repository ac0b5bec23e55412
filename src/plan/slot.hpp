// Classifies the slots of a token as masked, bad, local or remote: one function for the host planner and for
// kernels.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "ferry/types.hpp"

namespace ferry {

// The kind of an expert id, whatever the placement.
enum class IdKind : std::uint8_t {
  masked,  // -1: the token has no expert in this slot
  bad,     // any other number that is no expert's: skipped like a masked slot, and reported
  expert,
};

// Classifies an id when there are `experts` experts. It selects and does not branch, so a kernel that asks
// for one kind compiles to the comparison of that kind alone.
FERRY_HD constexpr IdKind classify_id(std::int64_t id, std::int32_t experts) {
  return id >= 0 && id < experts ? IdKind::expert : id == -1 ? IdKind::masked : IdKind::bad;
}

// Whether `rank` plans a route of its tokens to an expert of rank `destination`. Of replicated tokens every
// rank keeps the routes to its own experts; to it the others are as if they were masked.
FERRY_HD constexpr bool keeps_route(Input input, std::int32_t destination, std::int32_t rank) {
  return input == Input::own || destination == rank;
}

// The kind of a slot, as seen from one rank.
enum class SlotKind : std::uint8_t {
  masked,
  bad,
  local,   // its expert is on that rank
  remote,  // its expert is on another rank
};

// Classifies a slot as seen from `rank`. rank_of(std::int32_t expert) returns the rank of an expert; it is
// called for ids of experts only.
FERRY_HD_CALLS_ARGUMENT
template <class RankOf>
FERRY_HD SlotKind classify_slot(std::int64_t id, std::int32_t experts, std::int32_t rank, RankOf rank_of) {
  switch (classify_id(id, experts)) {
    case IdKind::masked:
      return SlotKind::masked;
    case IdKind::bad:
      return SlotKind::bad;
    case IdKind::expert:
      break;
  }
  return rank_of(static_cast<std::int32_t>(id)) == rank ? SlotKind::local : SlotKind::remote;
}

}  // namespace ferry
