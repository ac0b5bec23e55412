// Combine by source (ferry/max.hpp): operations that translate between plans and MAX's arrays, on device
// memory launches of kernels.
#pragma once

#include <cstdint>

#include "exchange/faults.hpp"
#include "ferry/exchange.hpp"
#include "layout/plan_layout.hpp"
#include "plan/slot.hpp"

namespace ferry {

// Copies the ids and the number of tokens of a dispatch, which a later combine reads.
struct KeepIdsCall {
  CallOptions options{};
  Ids ids{};
  std::int64_t tokens = 0;                     // N; with device_count the most it may be
  const std::int32_t* device_count = nullptr;  // or null
  std::int64_t* kept_ids = nullptr;            // [N, K]
  std::int32_t* kept_tokens = nullptr;
};

// Writes MAX's arrays of a dispatch: those of max::DispatchResult.
struct DescribeRowsCall {
  CallOptions options{};
  DispatchResult received{};
  std::uint32_t* row_offsets = nullptr;
  std::int32_t* expert_ids = nullptr;
  std::uint32_t* expert_usage_stats = nullptr;
  std::int32_t* src_info = nullptr;
  std::int32_t* counts = nullptr;
};

// Makes the plan of a combine from MAX's arrays. If they are wrong, the host's operation throws UsageError; a
// device's makes a plan that the combine refuses, and the rank's error says why.
struct PlanReturnCall {
  CallOptions options{};
  const std::int32_t* src_info = nullptr;
  const std::uint32_t* row_offsets = nullptr;
  const std::int32_t* counts = nullptr;
  Ids ids{};                                    // [N, K]
  std::int64_t tokens = 0;                      // N; with device_tokens the most it may be
  const std::int32_t* device_tokens = nullptr;  // or null
  Plan plan{};
  float* row_tags = nullptr;     // [rows]: travel as row_values
  std::byte* scratch = nullptr;  // zeroed once
  // For the host; a device knows its calls itself, and its arrays have the lengths that they can need.
  std::uint64_t combine = 0;  // call number of the combine
  struct {
    std::int64_t src_info = 0, row_offsets = 0, counts = 0;  // entries
  } lengths{};
};

// Checks that the combine that has just ended returned every row.
struct CheckReturnedCall {
  CallOptions options{};
  Plan plan{};
  const float* returned = nullptr;  // [N, K] the combine's route_values
  std::uint64_t combine = 0;        // as above
};

// None waits for another rank. On device memory they are enqueued on the call's stream.
class SourceOperations {
 public:
  virtual void keep_ids(const KeepIdsCall& call) = 0;
  virtual void describe_rows(const DescribeRowsCall& call) = 0;
  // Throws UsageError for memory that kernels cannot use, and in host memory for wrong arrays.
  virtual void plan_return(const PlanReturnCall& call) = 0;
  virtual void check_returned(const CheckReturnedCall& call) = 0;
  // Bytes of PlanReturnCall::scratch.
  virtual std::int64_t scratch_bytes() const = 0;

 protected:
  ~SourceOperations() = default;
};

// Null: a backend of host memory.
SourceOperations* source_operations(const Exchange& exchange);
// Call number of the lane's next call, in host memory.
std::uint64_t next_call(const Exchange& exchange, int lane);

// The rows of a combine by source: what each of MAX's arrays must say, for the host and for kernels.

// Travels with a row: names the combine and the row's expert. A source rank that finds another tag in a slot
// has not got the row in this call. Its bits are those of an fp32 that is neither NaN nor 0.
FERRY_HD std::uint32_t return_tag(std::uint64_t combine, std::int32_t expert) {
  constexpr std::uint64_t kNumbers = 2039;  // below it the exponent is not all ones
  constexpr int kExpertBits = 20;
  return static_cast<std::uint32_t>((combine % kNumbers + 1) << kExpertBits) |
         static_cast<std::uint32_t>(expert);
}

// A row of MAX's arrays. `source`: -1 for padding.
struct ReturnedRow {
  int group, source;
  std::int32_t token, slot;
  std::int32_t position;  // among the rows of its group from its source
};

// The arrays of a combine on one rank. `Lane` has the shape, by the names of cuda::LaneView.
template <class Lane>
struct ReturnedRows {
  const Lane& lane;
  const PlanReturnCall& call;
  std::int64_t tokens;                // N
  std::int32_t experts;               // L: the groups after theirs are empty
  const std::int32_t* group_first;    // [groups + 1] first row of each group, then the rows
  const std::int32_t* segment_first;  // [groups, R] first row of each group from each source
  const std::int32_t* route_expert;   // [N, K] by the ids of this rank, -1 masked

  FERRY_HD SourceFault fault_of_count(int i) const {
    const std::int32_t count = call.counts[i];
    if (count < 0 || count > most_rows(i)) return SourceFault::counts;
    const bool wrong =
        i / lane.ranks < lane.shared_experts && count != (i % lane.ranks == lane.rank ? shared().count : 0);
    return wrong ? SourceFault::shared_counts : SourceFault::none;
  }
  FERRY_HD std::int64_t rows_of_group(int group) const {
    std::int64_t rows = 0;
    for (int source = 0; source < lane.ranks; ++source) rows += call.counts[group * lane.ranks + source];
    return rows;
  }
  // What the counts give for an entry of row_offsets.
  FERRY_HD std::int32_t expected_offset(int index) const {
    for (int group = 0; group < lane.groups; ++group)
      if (rows_of_group(group) > 0 && index-- == 0) return group_first[group];
    return group_first[lane.groups];
  }
  // Finds a row's segment, which is the last one that begins at `at` or before, unless the row is padding.
  FERRY_HD ReturnedRow row(std::int64_t at) const {
    int low = 0, high = lane.groups * lane.ranks;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (segment_first[middle] <= at) {
        low = middle;
      } else {
        high = middle;
      }
    }
    ReturnedRow found{low / lane.ranks, low % lane.ranks, call.src_info[2 * at], call.src_info[2 * at + 1],
                      static_cast<std::int32_t>(at - segment_first[low])};
    if (found.position >= call.counts[low]) found.source = -1;
    return found;
  }
  // The fault of a row by itself. `expert`: of its group.
  FERRY_HD SourceFault fault_of_row(const ReturnedRow& row, std::int32_t expert) const {
    if (row.group < lane.shared_experts) {
      const bool in_order = row.token == shared().first + row.position && row.slot == lane.top_k + row.group;
      return in_order ? SourceFault::none : SourceFault::shared_row;
    }
    const bool own = row.source == lane.rank;
    const std::int64_t most = own ? tokens : lane.max_tokens;
    if (row.token < 0 || row.token >= most || row.slot < 0 || row.slot >= lane.top_k)
      return SourceFault::info;
    const std::int64_t route = std::int64_t{row.token} * lane.top_k + row.slot;
    return own && route_expert[route] != expert ? SourceFault::other_expert : SourceFault::none;
  }
  // The numbers of a fault of the entry, route or row `index`; expert_of(group): of a group of this rank.
  FERRY_HD_CALLS_ARGUMENT
  template <class ExpertOf>
  FERRY_HD SourceFaultNumbers numbers_of(SourceFault fault, std::int64_t index, ExpertOf expert_of) const {
    SourceFaultNumbers n{.a = index};
    const auto entry = static_cast<int>(index);
    switch (fault) {
      case SourceFault::tokens:
        n.a = call.device_tokens != nullptr ? *call.device_tokens : call.tokens;
        n.b = lane.max_tokens;
        break;
      case SourceFault::counts:
      case SourceFault::shared_counts:
        n.a = entry / lane.ranks;
        n.b = entry % lane.ranks;
        n.c = call.counts[entry];
        n.limit = shared().count;
        n.d = fault == SourceFault::counts ? most_rows(entry) : n.b == lane.rank ? n.limit : 0;
        break;
      case SourceFault::capacity:
        n.a = group_first[lane.groups];
        n.b = lane.capacity_rows;
        break;
      case SourceFault::row_offsets:
        n.b = static_cast<std::int32_t>(call.row_offsets[entry]);
        n.c = expected_offset(entry);
        break;
      case SourceFault::missing:
        n.a = route_expert[index];
        n.c = index / lane.top_k;
        n.d = index % lane.top_k;
        break;
      default:
        describe_row(fault, row(index), expert_of, n);
    }
    return n;
  }

 private:
  // The tokens that have shared rows on this rank.
  FERRY_HD SharedTokens shared() const {
    return SharedTokens::of<std::int64_t>(tokens, lane.rank, lane.shared_split);
  }
  FERRY_HD std::int64_t most_rows(int count) const {
    const bool filled = count / lane.ranks < lane.shared_experts + experts &&
                        keeps_route(lane.input, count % lane.ranks, lane.rank);
    return filled ? std::int64_t{lane.max_tokens} * lane.top_k : 0;
  }

  FERRY_HD_CALLS_ARGUMENT
  template <class ExpertOf>
  FERRY_HD void describe_row(SourceFault fault, const ReturnedRow& row, ExpertOf expert_of,
                             SourceFaultNumbers& n) const {
    n.peer = row.source;
    n.c = row.token;
    n.d = row.slot;
    if (fault == SourceFault::shared_row) {
      n.limit = shared().first + row.position;
      n.b = lane.top_k + row.group;
    } else if (fault == SourceFault::info) {
      n.limit = row.source == lane.rank ? tokens : lane.max_tokens;
      n.b = lane.top_k;
    } else if (fault == SourceFault::other_expert) {
      n.b = expert_of(row.group);
    } else {
      n.b = other_row(row, n.a);
    }
  }
  // The first row of the same token and slot.
  FERRY_HD std::int64_t other_row(const ReturnedRow& like, std::int64_t at) const {
    for (std::int64_t other = 0; other < at; ++other) {
      if (call.src_info[2 * other] != like.token || call.src_info[2 * other + 1] != like.slot) continue;
      if (row(other).source == like.source) return other;
    }
    return at;
  }
};

}  // namespace ferry
