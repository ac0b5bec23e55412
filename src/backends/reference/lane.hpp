// One lane of the reference backend: a rank lays its inputs where all can read them, waits for the others,
// and asks the oracle what follows from all inputs together.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/reference/staging_layout.hpp"
#include "exchange/backend.hpp"
#include "group/channel.hpp"
#include "layout/plan_layout.hpp"
#include "memory/symmetric_memory.hpp"
#include "oracle/combine.hpp"
#include "oracle/dispatch.hpp"

namespace ferry::reference {

// What all lanes of an exchange share.
struct Shared {
  Rank rank;
  Config config;
  Stage stage;
  SymmetricMemory memory;

  int me() const { return rank.index(); }
  int ranks() const { return rank.size(); }
};

class Lane {
 public:
  Lane(const Shared& shared, int index);

  // lane_dispatch.cpp
  void dispatch_send(const DispatchCall& call);
  DispatchResult dispatch_receive();

  // lane_combine.cpp
  void combine_send(const CombineCall& call);
  void combine_receive();

  // lane_values.cpp
  void route_values(const float* values, const Plan& plan, float* row_values);
  const StepMetadata* metadata(std::int32_t count);

  void refuse(Operation operation, const Error& error) noexcept { channel_.refuse(operation, error); }

  CallDiagnostics findings;
  WireCounts wire;  // what has to cross by the contract; the reference itself moves more
  std::vector<std::int64_t> expert_load;
  std::int64_t dispatches = 0;

 private:
  // What the lane's memory holds beside the rows, until its next dispatch.
  struct Arrived {
    std::array<std::vector<std::byte>, kMaxParts> parts;
    std::vector<std::byte> plan;
    oracle::RowMetadata notes;
    std::vector<float> dots;
    std::vector<std::int32_t> counts, row_offsets, group_expert;
    HostTotals totals;
  };

  void post_all();
  void wait_all();
  void write_note(const Note& note);
  Note note_of(int peer) const;
  std::byte* dispatch_stage(int rank) const;
  std::byte* combine_stage(int rank) const;

  std::vector<std::int64_t> own_ids();
  void stage_rows();
  oracle::GlobalInputs read_global_inputs();
  PlanView open_plan();
  void finish_plan(const oracle::GlobalInputs& global, const oracle::RowPositions& positions,
                   const PlanView& plan);
  void write_received(const oracle::GlobalInputs& global, const oracle::RowPositions& positions);
  void count_traffic(const oracle::GlobalInputs& global, const oracle::RowPositions& positions);
  void require_alike(const char* operation, const char* argument, std::int32_t Note::* given) const;

  oracle::RowPositions places_of(const Plan& plan);
  oracle::Outcome read_outcome(const CombineCall& call) const;
  void count_combine(const CombineCall& call);

  void record_bad_source(std::int64_t index);

  const Shared& shared_;
  const int index_;
  Channel channel_;
  Arrived arrived_;
  DispatchResult received_;
  StepMetadata metadata_;
  DispatchCall dispatch_;
  CombineCall combine_;
};

}  // namespace ferry::reference
