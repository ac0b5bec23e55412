// Small calls on the host: all_gather_v and reduce_scatter_v with the terms that ranks exchange first, their
// checks and the rounds of data; and the numbers of metadata.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "exchange/backend.hpp"
#include "exchange/compared_options.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"
#include "group/fault_points.hpp"

namespace ferry {

// A rank's terms.
struct GatherTerms {
  std::int64_t held;  // all_gather_v: rows that `gathered` has room for; reduce_scatter_v: its `total`
  // The row of `gathered` at which its own rows lie, or of `rows` at which its sums do; -1: they are apart.
  std::int64_t place;
  std::int32_t count;  // its own rows
  // reduce_scatter_v: `held` must be the sum of the counts. 0: the count was in device memory, so the rows
  // are at least as many.
  std::int32_t exact;
};

// The ranks that gather from each other: [first, first + count).
struct SubGroup {
  std::size_t first, count;

  // The sub-group of `rank`. `size`: ranks of a sub-group; 0: all.
  static SubGroup of(int rank, int size, int ranks) {
    if (size == 0) return {0, static_cast<std::size_t>(ranks)};
    return {static_cast<std::size_t>(rank / size * size), static_cast<std::size_t>(size)};
  }
  bool holds(int rank) const {
    return static_cast<std::size_t>(rank) >= first && static_cast<std::size_t>(rank) < first + count;
  }
  std::span<const GatherTerms> terms(std::span<const GatherTerms> all) const {
    return all.subspan(first, count);
  }
};

// `rank` holds `held` rows (GatherTerms) where the counts add up to `sum`.
// @throws UsageError  always
[[noreturn]] void raise_rows_held(Operation operation, int rank, std::int64_t held, std::int64_t sum);

// The `rows` of all_gather_v or the `sums` of reduce_scatter_v lie at row `place` (GatherTerms) of the other
// array on this rank, and not at row `own`, which is theirs.
// @throws UsageError  always
[[noreturn]] void raise_misplaced(Operation operation, int rank, std::int64_t place, std::int64_t own);

// Call with each number that `rank` has told of itself. The rank has checked it, so one out of range means
// that the memory which the ranks share is damaged.
// @throws SystemError  `value` is below 0 or above `most`
void check_told(Operation operation, const char* name, std::int64_t value, std::int64_t most, int rank);

// The bytes of a block that belong to the round from `begin` on, of rounds of `round_bytes`.
inline std::int64_t bytes_in_round(std::int64_t block_bytes, std::int64_t begin, std::int64_t round_bytes) {
  return std::clamp<std::int64_t>(block_bytes - begin, 0, round_bytes);
}

// A call whose terms are known: what this rank sends in each round, and what becomes of what it receives.
class GatherRounds {
 public:
  struct Block {
    const std::byte* data;
    std::int64_t bytes;
  };

  // `terms` [R]. Every rank checks the terms of all ranks, so that all of them end with the same error.
  // @throws UsageError  a rank has too little room, a total that is not the sum of the counts, or rows or
  // sums at the place of another's
  GatherRounds(const GatherCall& call, int me, std::vector<GatherTerms> terms);

  const std::vector<Block>& blocks() const { return blocks_; }  // [R] that this rank sends each rank
  std::int64_t largest() const { return largest_; }             // bytes of the largest block of any pair
  std::int64_t gathered() const;                                // rows of the sub-group

  // Takes the bytes from `begin` on of the blocks for this rank. `block_of(source)`: the address of those
  // from a rank, this one included. Calls copy(to, from, bytes) for each block, or add(blocks, to, bytes).
  template <class BlockOf, class Copy, class Add>
  void receive(std::int64_t begin, std::int64_t round_bytes, BlockOf block_of, Copy copy, Add add) const {
    auto* out = static_cast<std::byte*>(call_.out);
    std::vector<const void*> addends;
    for (std::size_t source = group_.first; source < group_.first + group_.count; ++source) {
      if (call_.adds()) {
        addends.push_back(block_of(static_cast<int>(source)));
        continue;
      }
      const std::int64_t block_bytes = terms_[source].count * call_.row_bytes,
                         bytes = bytes_in_round(block_bytes, begin, round_bytes);
      if (bytes > 0) copy(out + begin, block_of(static_cast<int>(source)), bytes);
      out += block_bytes;
    }
    if (!call_.adds()) return;
    const std::int64_t bytes = bytes_in_round(own_bytes_, begin, round_bytes);
    if (bytes > 0) add(addends, out + begin, bytes);
  }

 private:
  const GatherCall& call_;
  const SubGroup group_;
  const std::vector<GatherTerms> terms_;
  std::vector<Block> blocks_;
  std::int64_t own_bytes_ = 0, largest_ = 0;
};

// Over a link by which the ranks exchange blocks: cpu::PeerLink or collective::EngineCall.

// Returns the value of every rank, [R], in a call of the link. `options`: equal on all ranks.
template <class Value, class Link>
std::vector<Value> exchange_values(Link& link, Operation operation, std::span<const ComparedOption> options,
                                   const Value& mine, const Rank& rank) {
  link.begin(operation, options);
  fault_point(FaultPoint::metadata_begin, rank.index());
  for (int peer = 0; peer < rank.size(); ++peer) std::memcpy(link.summary_to(peer), &mine, sizeof mine);
  link.post(false);
  fault_point(FaultPoint::metadata_posted, rank.index());
  link.wait();
  fault_point(FaultPoint::metadata_waited, rank.index());
  std::vector<Value> all(static_cast<std::size_t>(rank.size()));
  for (int peer = 0; peer < rank.size(); ++peer)
    std::memcpy(&all[static_cast<std::size_t>(peer)], link.summary_from(peer), sizeof mine);
  return all;
}

template <JoinsNumbers Call, class Link>
typename Call::Result join_numbers(Link& link, std::int32_t number, const Rank& rank) {
  typename Call::Result all{};
  int peer = 0;
  for (const std::int32_t theirs : exchange_values(link, Call::operation, {}, number, rank)) {
    check_told(Call::operation, "count", theirs, Call::most(rank.size()), peer);
    Call::join(Call::of(theirs, peer, rank.index()), &all);
    ++peer;
  }
  return all;
}

// `call.count` is this rank's. Throws as GatherRounds().
template <class Link>
GatherRounds exchange_terms(Link& link, const GatherCall& call, const Rank& rank) {
  const ComparedOption option =
      call.adds() ? type_option("type", call.type) : ComparedOption{"row_bytes", call.row_bytes};
  const GatherTerms mine{.held = call.held,
                         .place = call.place,
                         .count = static_cast<std::int32_t>(call.count),
                         .exact = call.device_count == nullptr ? 1 : 0};
  return {call, rank.index(), exchange_values(link, call.operation, {&option, 1}, mine, rank)};
}

}  // namespace ferry
