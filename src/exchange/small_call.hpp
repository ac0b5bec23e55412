// Calls that carry numbers, or rows without routing. Layers that only pass them on do so once for all.
#pragma once

#include <cstdint>
#include <variant>

#include "ferry/exchange.hpp"

namespace ferry {

struct CombineCall;

// The arguments of a call, checked.
struct MetadataCall {
  static constexpr Operation operation = Operation::metadata;
  CallOptions options{};
  std::int32_t count = 0;
  // Device backends only:
  const std::int32_t* device_count = nullptr;  // given: the count is read from there when the call runs
  StepMetadata* into = nullptr;                // null: memory of the lane
};

// route_values: from the routes [N, K] to the rows [total]; return_values: from the rows to the routes.
struct RouteValuesCall {
  Operation operation = Operation::route_values;
  CallOptions options{};
  const float* from = nullptr;
  Plan plan{};
  float* to = nullptr;
  const CombineCall* combine = nullptr;  // given: the values are its topk_weights, and this is its first part

  bool returns() const { return operation == Operation::return_values; }
  Operation needed_by() const { return combine != nullptr ? Operation::combine : operation; }
};

struct DispatchCountsCall {
  static constexpr Operation operation = Operation::dispatch_counts;
  CallOptions options{};
  Ids ids{};
  std::int32_t tokens = 0;
};

// all_gather_v, or reduce_scatter_v, whose rows are values of `type`.
struct GatherCall {
  Operation operation = Operation::all_gather_v;
  CallOptions options{};
  int sub_group = 0;  // ranks of a sub-group, which are consecutive and gather from each other; 0: all ranks
  const void* rows = nullptr;  // [count, row_bytes]; reduce_scatter_v: [held, row_bytes]
  void* out = nullptr;         // `gathered` [held, row_bytes]; `sums` [count, row_bytes]
  std::int64_t count = 0;      // this rank's rows
  std::int64_t held = 0;       // as GatherTerms::held
  std::int64_t row_bytes = 0;
  DType type = DType::bf16;                    // of reduce_scatter_v
  const std::int32_t* device_count = nullptr;  // device backends: given: where the count is, `count` at most
  std::int64_t place = -1;                     // as GatherTerms::place

  bool adds() const { return operation == Operation::reduce_scatter_v; }
};

using SmallCall = std::variant<MetadataCall, RouteValuesCall, DispatchCountsCall, GatherCall>;

inline Operation operation_of(const SmallCall& call) {
  return std::visit([](const auto& each) { return each.operation; }, call);
}
inline const CallOptions& call_options_of(const SmallCall& call) {
  return std::visit([](const auto& each) -> auto& { return each.options; }, call);
}

// What a call returns, if it is of the kind.
struct SmallResult {
  const StepMetadata* metadata = nullptr;
  DispatchCounts counts{};
  std::int64_t gathered = -1;  // rows; -1 on device backends
};

}  // namespace ferry
