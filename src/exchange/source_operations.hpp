// Combine by source (ferry/max.hpp): operations that translate between plans and MAX's arrays, on device
// memory launches of kernels.
#pragma once

#include <cstdint>

#include "ferry/exchange.hpp"

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
  // For the host; a device counts its combines itself, and its arrays have the lengths that they can need.
  std::uint64_t combine = 0;  // number of the lane's combine, the same on every rank
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

}  // namespace ferry
