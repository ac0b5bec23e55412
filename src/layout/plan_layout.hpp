// The layout of a plan's storage, for the size query and for backends. The storage holds indices only, never
// pointers.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "ferry/plan.hpp"

namespace ferry {

// The numbers that a plan's storage depends on, the same on every rank.
struct PlanShape {
  std::int32_t ranks = 0;
  std::int32_t experts = 0;
  std::int32_t top_k = 0;
  std::int32_t max_tokens = 0;
  std::int32_t shared_experts = 0;
  std::int32_t to_every_rank = 0;  // 1: tokens go to every rank (Transfer::gather)
  std::int64_t capacity = 0;       // largest over the ranks: rows of all groups together

  friend bool operator==(const PlanShape&, const PlanShape&) = default;

  // Destinations that a token has at most.
  FERRY_HD constexpr std::int32_t most_ranks() const {
    return to_every_rank != 0 || ranks < top_k ? ranks : top_k;
  }
};

struct PlanHeader {
  std::uint64_t magic;        // is_complete() once the plan is, 0 while it is being written
  std::uint64_t config_hash;  // of everything that row positions depend on
  std::uint64_t placement_version;
  std::uint64_t call;  // call number of the dispatch that filled it
  PlanShape shape;
  std::int32_t rank;
  std::int32_t tokens;   // N
  std::int64_t total;    // rows here: row_offsets[G]
  std::int64_t dropped;  // routes and shared rows (rank_major: rows) dropped on all ranks
  std::uint64_t check;   // header_check() of all the above: a call with a damaged header is refused
};

inline constexpr std::uint64_t kPlanMagic = 0x004e414c50595246;  // "FRYPLAN"
// In host memory, in place of kPlanMagic: the last rows of the total were not stored (ReceiveBuffers::rows).
inline constexpr std::uint64_t kFewerRowsMagic = kPlanMagic | std::uint64_t{1} << 56;

constexpr bool is_complete(const PlanHeader& header) {
  return header.magic == kPlanMagic || header.magic == kFewerRowsMagic;
}

FERRY_HD constexpr std::uint64_t header_check(const PlanHeader& header) {
  const std::uint64_t fields[] = {header.config_hash,
                                  header.placement_version,
                                  header.call,
                                  static_cast<std::uint64_t>(header.shape.ranks),
                                  static_cast<std::uint64_t>(header.shape.experts),
                                  static_cast<std::uint64_t>(header.shape.top_k),
                                  static_cast<std::uint64_t>(header.shape.max_tokens),
                                  static_cast<std::uint64_t>(header.shape.shared_experts),
                                  static_cast<std::uint64_t>(header.shape.to_every_rank),
                                  static_cast<std::uint64_t>(header.shape.capacity),
                                  static_cast<std::uint64_t>(header.rank),
                                  static_cast<std::uint64_t>(header.tokens),
                                  static_cast<std::uint64_t>(header.total),
                                  static_cast<std::uint64_t>(header.dropped)};
  std::uint64_t hash = header.magic;
  for (const std::uint64_t field : fields) hash = (hash ^ field) * 0x9e3779b97f4a7c15 + (hash >> 29);
  return hash;
}

constexpr std::int64_t align_up(std::int64_t value, std::int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Pointers into a plan's storage. R, E, K, T as in PlanShape, P = most_ranks().
struct PlanView {
  PlanHeader* header;
  // First array, so that its offset does not depend on the shape.
  Source* sources;               // [capacity] of every row here
  std::int32_t* counts;          // [R, E] routes of every rank to every expert
  std::int32_t* tokens_between;  // [R, R] tokens that rank s sends to rank d
  std::int32_t* rank_tokens;     // [R] N of every rank; nothing without shared experts
  // This rank's tokens.
  std::int32_t* route_expert;  // [T, K] global id, -1 masked
  std::int32_t* route_rank;    // [T, K] destination, -1 masked
  std::int32_t* route_row;     // [T, K] row there, -1 masked or dropped
  std::int32_t* token_ranks;   // [T, P] destinations of a token, ascending, then -1
  std::int32_t* sent_tokens;   // [R, T] token of the i-th message to a rank
  // The messages that this rank receives. [s, i]: message i of source s.
  std::int32_t* received_token;            // [R, T] its token at the source
  std::int32_t* received_position;         // [R, T] this rank's index in that token's list of destinations
  std::int32_t* received_rows_of_message;  // [R, T, K] row here of each slot; -1 for other ranks' slots,
                                           // masked or dropped
  std::int64_t bytes;                      // of the storage
};

FERRY_HD PlanView view_plan(void* storage, const PlanShape& shape) {
  const std::int64_t ranks = shape.ranks, slots = std::int64_t{shape.max_tokens} * shape.top_k;
  const std::int64_t messages = ranks * shape.max_tokens;
  std::int64_t end = 0;
  // The arrays follow one another, each at a multiple of 16 bytes.
  auto take = [&](std::int64_t bytes) {
    const std::int64_t begin = end;
    end = (begin + bytes + 15) / 16 * 16;
    return reinterpret_cast<std::uintptr_t>(storage) + static_cast<std::uintptr_t>(begin);
  };
  auto ints = [&](std::int64_t count) { return reinterpret_cast<std::int32_t*>(take(count * 4)); };
  PlanView view{};
  view.header = reinterpret_cast<PlanHeader*>(take(sizeof(PlanHeader)));
  view.sources = reinterpret_cast<Source*>(take(shape.capacity * static_cast<std::int64_t>(sizeof(Source))));
  view.counts = ints(ranks * shape.experts);
  view.tokens_between = ints(ranks * ranks);
  view.rank_tokens = ints(shape.shared_experts > 0 ? ranks : 0);
  view.route_expert = ints(slots);
  view.route_rank = ints(slots);
  view.route_row = ints(slots);
  view.token_ranks = ints(std::int64_t{shape.max_tokens} * shape.most_ranks());
  view.sent_tokens = ints(messages);
  view.received_token = ints(messages);
  view.received_position = ints(messages);
  view.received_rows_of_message = ints(messages * shape.top_k);
  view.bytes = end;
  return view;
}

// A row whose number is known only to the rank that holds it: in a plan's route_row, for the combines of host
// backends that return every row: the destination holds a row of the route, and finds it by token and slot in
// the `sources` of its own plan. Plans of a dispatch have no such entries; those made from src_info (src/max)
// do.
inline constexpr std::int32_t kRowOfPeer = -2;

}  // namespace ferry
