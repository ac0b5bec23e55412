// Combine by source in host memory.
#pragma once

#include "exchange/source_operations.hpp"
#include "ferry/config.hpp"

namespace ferry::max {

// `config` is complete and outlives the object, which has no state of its own. For combines with the
// reductions exact and unreduced.
class HostOperations final : public SourceOperations {
 public:
  HostOperations(const Config& config, int rank) : config_(config), me_(rank) {}

  void keep_ids(const KeepIdsCall& call) override;
  void describe_rows(const DescribeRowsCall& call) override;
  // Ids out of range are masked slots.
  void plan_return(const PlanReturnCall& call) override;
  void check_returned(const CheckReturnedCall& call) override;
  std::int64_t scratch_bytes() const override { return 0; }

 private:
  const Config& config_;
  const int me_;
};

}  // namespace ferry::max
