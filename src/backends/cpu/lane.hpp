// A lane of a host backend on one rank: its link to the peers, its arrays, and the summaries of its calls.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "backends/cpu/kernels/kernels.hpp"
#include "backends/cpu/link/peer_link.hpp"
#include "base/mapping.hpp"
#include "exchange/backend.hpp"
#include "exchange/configuration.hpp"
#include "exchange/gather.hpp"
#include "exchange/lane_counts.hpp"
#include "format/parts.hpp"
#include "group/agreement.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::cpu {

// What all lanes of an exchange share. Constant after construction.
struct CpuContext {
  Rank rank;
  Config config;
  PlanShape plan_shape;
  std::uint64_t row_order_hash;
  std::int64_t messages_per_chunk;  // dispatch: from one rank to another
  std::int64_t tokens_per_chunk;    // combine: of a source rank
  const Kernels& kernels;

  int me() const { return rank.index(); }
  int ranks() const { return rank.size(); }
  bool other_node(int peer) const { return rank.topology().node_of(peer) != rank.topology().node_of(me()); }
};

// Offsets of a lane's arrays in its local memory. The size query and the construction both use this.
struct LocalArrays {
  std::int64_t plan = 0, plan_bytes = 0;
  std::int64_t parts = 0;  // of received rows; each dispatch lays the area out for its format
  std::int64_t weight = 0, local_ids = 0, dots = 0, row_weights = 0;
  std::int64_t shared_outputs = 0;  // [S, T, H] of the combine type, between the phases of a combine
  std::int64_t group_expert = 0, counts = 0, row_offsets = 0, tile_offsets = 0;
  // expert_indexed: DispatchResult's arrays of these names, which lie behind one another.
  std::int64_t index = 0, slot = 0, block_group = 0, source_offsets = 0, source = 0, index_bytes = 0;
  std::int64_t parts_bytes = 0;
  std::int64_t bytes = 0;  // of all arrays
};
LocalArrays local_arrays(const Config& config, int rank);

// Received rows begin at a page, so that what lies before them in memory does not decide how well the
// processor prefetches rows: at other offsets sums of one or two rows took up to three times as long.
inline constexpr std::int64_t kReceivedRowsAlignment = 4096;

class Lane {
 public:
  Lane(const CpuContext& exchange_context, std::unique_ptr<PeerLink> link_to_peers);

  const CpuContext& context;
  const std::unique_ptr<PeerLink> link;
  const LocalArrays arrays;

  CallDiagnostics diagnostics;  // since the last check()
  LaneCounts counts;
  alignas(8) std::byte joined[NumberCall::kMostResultBytes];
  std::vector<std::int32_t> routes, tokens;  // of the last dispatch_counts: [L], [R]
  HostTotals totals;

  template <class T>
  T* array(std::int64_t offset) const {
    return reinterpret_cast<T*>(local_.data() + offset);
  }

  OwnArrays own_arrays() const;

  // A plan may be damaged between calls, so every entry is checked before it is used. Returns whether `value`
  // is in [0, limit); otherwise counts the entry at index `entry` as bad.
  bool valid_entry(std::int32_t value, std::int64_t limit, std::int64_t entry) {
    if (value >= 0 && value < limit) return true;
    record_bad_source(entry);
    return false;
  }
  // A count of a plan or a peer, 0 to `most`; 0 if it is bad.
  std::int32_t valid_count(std::int32_t count, std::int64_t most, std::int64_t entry) {
    return valid_entry(count, most + 1, entry) ? count : 0;
  }
  void record_bad_source(std::int64_t entry);
  // Messages from `source` to `destination` in a plan; 0 if the entry is bad.
  int message_count(const PlanView& plan, int source, int destination);

 private:
  LocalMemory local_;
};

// Row `row` of rows that lie `stride` bytes apart; 0: dense, `row_bytes` each.
template <class Data>
auto* row_at(Data* data, std::int64_t stride, std::int64_t row_bytes, std::int64_t row) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const std::byte, std::byte>;
  return static_cast<Byte*>(data) + row * (stride != 0 ? stride : row_bytes);
}

// Streaming stores for a call that moves more bytes than a core's cache holds, cached stores otherwise.
Store store_for(std::int64_t bytes);

// Whether this rank was given an optional argument. `irrelevant`: the rank has no tokens or rows that the
// argument would describe, so either is right there.
enum class Given : std::int32_t { no = 0, yes = 1, irrelevant = 2 };

inline Given given(const void* argument, bool relevant) {
  return !relevant ? Given::irrelevant : argument != nullptr ? Given::yes : Given::no;
}

// The head of a call's summary. A dispatch that makes a plan appends its routes to every expert [E] and its
// messages to every rank [R], both int32.
struct SummaryHead {
  Given arguments[2];     // combine: values, row_weights
  std::int32_t split;     // 1: send phase and receive phase are separate calls
  std::int32_t max_rows;  // most rows this rank's chunks cover; see ChunkSchedule::add_rank
  // combine: every row that this rank sends is below it; -1: it sends all. dispatch:
  // DispatchCall::row_limit()
  std::int32_t rows_end;
  std::int32_t tokens;  // N
};
static_assert(sizeof(SummaryHead) == 4 * kCallSummaryWords);

// Checks that an optional argument is given on all ranks or on none. Pointers alone cannot be compared,
// because a rank without rows may pass either; so every rank sends a Given, and all ranks check the same
// ones.
class OptionalArgument {
 public:
  void add_rank(int rank, Given given) {
    if (given == Given::yes && first_with_ < 0) first_with_ = rank;
    if (given == Given::no && first_without_ < 0) first_without_ = rank;
  }
  bool given_anywhere() const { return first_with_ >= 0; }

  // Call after add_rank() of every rank. Throws UsageError if some ranks gave the argument and others did
  // not.
  void require_same(const char* operation, const char* argument) const {
    if (first_with_ < 0 || first_without_ < 0) return;
    throw_given_on_some(operation, argument, first_with_, first_without_);
  }

 private:
  int first_with_ = -1;
  int first_without_ = -1;
};

// The small calls of a lane (small_calls.cpp). The arrays of a result are memory of the lane.
template <JoinsNumbers Call>
SmallResult run(Lane& lane, const Call& call) {
  void* const into = call.into != nullptr ? call.into : lane.joined;
  return {.joined = new (into)
              typename Call::Result(join_numbers<Call>(*lane.link, call.number.value, lane.context.rank))};
}
// route_values: sends each route's value to its row; padding rows get 0. return_values: the reverse; masked
// and dropped slots get 0.
SmallResult run(Lane& lane, const RouteValuesCall& call);
// Counts what a dispatch of the ids delivers to this rank.
SmallResult run(Lane& lane, const DispatchCountsCall& call);
// Several calls of the lane: one in which the ranks exchange their counts, then one for each round of data. A
// round carries as many bytes between two ranks as a dispatch stages for a pair.
SmallResult run(Lane& lane, const GatherCall& call);

}  // namespace ferry::cpu
