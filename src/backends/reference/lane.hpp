// One lane of the reference backend: a rank publishes its inputs, waits for its peers' inputs, and computes
// its results from all of them with the oracle.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/reference/staging_layout.hpp"
#include "exchange/backend.hpp"
#include "exchange/gather.hpp"
#include "exchange/lane_counts.hpp"
#include "group/channel.hpp"
#include "layout/plan_layout.hpp"
#include "memory/symmetric_memory.hpp"
#include "oracle/combine.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/gather.hpp"

namespace ferry::reference {

// What all lanes of an exchange share. Constant after construction.
struct ReferenceContext {
  Rank rank;
  Config config;
  StagingLayout staging;
  SymmetricMemory memory;

  int me() const { return rank.index(); }
  int ranks() const { return rank.size(); }
};

class Lane {
 public:
  Lane(const ReferenceContext& context, int index);

  // lane_dispatch.cpp
  void dispatch_send(const DispatchCall& call);
  DispatchResult dispatch_receive();

  // lane_combine.cpp
  void combine_send(const CombineCall& call);
  void combine_receive();

  // lane_values.cpp
  void route_values(const float* values, const Plan& plan, float* row_values);
  const StepMetadata* metadata(std::int32_t count);
  DispatchCounts dispatch_counts(const Ids& ids, std::int32_t tokens);

  // lane_gather.cpp
  std::int64_t all_gather_v(const AllGatherCall& call);
  void reduce_scatter_v(const ReduceScatterCall& call);

  void refuse(Operation operation, const Error& error) noexcept { channel_.refuse(operation, error); }

  const void* received_rows() const { return received_.parts[0].data(); }

  CallDiagnostics diagnostics;
  LaneCounts counts;  // of the traffic that the contract requires; this backend itself moves more

 private:
  // The result of the last dispatch, in the lane's memory.
  struct ReceivedData {
    std::array<std::vector<std::byte>, kMaxParts> parts;
    std::vector<std::byte> plan;
    oracle::RowMetadata metadata;
    std::vector<float> dots;
    std::vector<std::int32_t> counts, row_offsets, group_expert, tile_offsets;
    HostTotals totals;
  };

  void post_all();
  void wait_all();
  void write_summary(const CallSummary& summary);
  CallSummary summary_of(int peer) const;
  std::byte* dispatch_staging(int rank) const;
  std::byte* combine_staging(int rank) const;

  std::vector<std::int64_t> ids_of_call();
  void stage_inputs();
  oracle::GlobalInputs read_global_inputs();
  void find_bad_scales_of_experts(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions);
  void find_bad_scales(const oracle::GlobalInputs& inputs);
  PlanView open_plan();
  void finish_plan(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions,
                   const PlanView& plan);
  void drop_rows(const oracle::RowPositions& positions, const PlanView& plan);
  std::int64_t stored_rows(const Plan& plan) const;
  void write_received(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions);
  void count_traffic(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions);
  void require_same(const char* operation, const char* argument,
                    std::int32_t CallSummary::* argument_given) const;

  std::int64_t row_of_source(int rank, const Source& source) const;
  oracle::RowPositions positions_of(const Plan& plan);
  oracle::ExpertOutputs read_combine_inputs(const CombineCall& call) const;
  std::vector<std::byte> with_residual(std::vector<std::byte> result) const;
  void count_combine(const CombineCall& call);

  std::vector<GatherTerms> exchange_terms(Operation operation, const GatherTerms& mine,
                                          const CallOption& same_everywhere);
  std::vector<oracle::Bytes> publish(Operation operation, const void* rows,
                                     const std::vector<std::int64_t>& bytes);

  void record_bad_source(std::int64_t index);

  const ReferenceContext& context_;
  const int index_;
  Channel channel_;
  ReceivedData received_;
  DispatchResult result_;
  StepMetadata metadata_;
  bool leaves_out_rows_ = false;               // a dispatch has not stored all of its rows
  std::vector<std::int32_t> routes_, tokens_;  // of the last dispatch_counts
  DispatchCall dispatch_;
  float global_scale_ = 1;           // of the dispatch, read in its send phase
  std::vector<float> input_scales_;  // likewise
  CombineCall combine_;
};

}  // namespace ferry::reference
