// What becomes of a slot of a token: masked, bad, of a shared expert, of an expert here or elsewhere, and,
// where experts are in slices, of which slice; and where the rows of shared experts lie. The host planner and
// kernels share these functions.
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

// Whether a slot is of a shared expert: no id stands for it. Shared expert s has slot K + s.
FERRY_HD constexpr bool is_shared_slot(std::int32_t slot, std::int32_t top_k) {
  return slot >= top_k;
}

// Experts sliced by tensor parallelism: the exchange inside has each slice as an expert of its own, slice i
// of expert e as its expert e * tp + i.
struct ExpertSlices {
  std::int32_t experts, tp;

  // The id inside, of the slice on tp rank `tp_rank`. Masked slots stay masked, and bad ids bad:
  // unsliced_bad_id() gives them back.
  FERRY_HD constexpr std::int64_t id_of_slice(std::int64_t id, std::int32_t tp_rank) const {
    const std::int64_t most = INT64_MAX - slices();
    if (classify_id(id, experts) == IdKind::expert) return id * tp + tp_rank;
    if (id < 0) return id;
    return (id < most ? id : most) + slices();
  }
  // The id that was passed for a bad one inside; one near 2^63 has become smaller.
  FERRY_HD constexpr std::int64_t unsliced_bad_id(std::int64_t inside) const {
    return inside < 0 ? inside : inside - slices();
  }
  FERRY_HD constexpr std::int64_t slices() const { return std::int64_t{experts} * tp; }
};

// The tokens of a sub-group that tp rank `tp_rank` sends: [first, first + count).
struct TokenSlice {
  std::int64_t first, count;

  FERRY_HD static constexpr TokenSlice of(std::int64_t tokens, int tp_rank, int tp) {
    const std::int64_t first = tp_rank * tokens / tp;
    return {first, (tp_rank + 1) * tokens / tp - first};
  }
};

// Where the rows of shared experts lie on a rank: one function for the host planner and for kernels.
//
// Every rank holds the shared experts, so their rows are a rank's own tokens and never travel. Their groups
// come before those of the routed experts, and a row's position follows from the rank's number of tokens
// alone.
//
// Tokens [first, first + count) of a rank.
struct SharedTokens {
  std::int64_t first, count;

  // Those of `tokens` tokens that have shared rows on `rank`. `split`: Config::shared_split. Int: holds
  // split * tokens; kernels, where division is costly, take 32 bits.
  template <class Int>
  FERRY_HD static constexpr SharedTokens of(Int tokens, Int rank, Int split) {
    if (split == 0) return {0, tokens};
    const Int low = rank < split ? rank : split, high = rank < split ? rank + 1 : split,
              first = low * tokens / split;
    return {first, high * tokens / split - first};
  }
};

struct SharedRows {
  std::int64_t first;     // the rank's first token that has shared rows
  std::int64_t count;     // how many tokens from there on have them
  std::int64_t stride;    // rows from one group to the next; expert_padded: rows that a group has room for
  std::int64_t capacity;  // rows of the rank, all groups together

  // The row of a token in the group of shared expert `expert`, or -1 if it is past the capacity or the token
  // has its shared rows on another rank.
  FERRY_HD constexpr std::int64_t row(std::int64_t expert, std::int64_t token) const {
    const std::int64_t index = token - first, row = expert * stride + index;
    return index >= 0 && index < count && index < stride && row < capacity ? row : -1;
  }
};

}  // namespace ferry
