// The ranks of an exchange whose dispatches and combines are kernels that run on the host. Every call is
// compared with the oracle.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/host/hop_transport.hpp"
#include "backends/cuda/host/memory_layout.hpp"
#include "group/control_block.hpp"
#include "harness/step_inputs.hpp"

namespace ferry::cuda {

// How a test runs a call.
struct CallForm {
  bool few_tokens = false;  // dispatch in the mode of few tokens, from ids
  bool by_plan = false;     // dispatch by the plan of the dispatch before
  bool split_phases = false;
  bool keeps_inputs =
      false;  // in phases: the receive phase reads this rank's own rows where the caller has them
  bool count_on_device = false;  // N lies in memory that the kernel reads
  bool direct_write = false;     // received rows lie in symmetric memory, which senders of many tokens write
  bool generic = false;          // combine by a kernel for every call
  bool adds_to_result = false;   // the combine's result is its residual
  bool no_memory_without_rows = false;     // a rank without rows passes neither outputs nor row_values
  std::vector<std::int64_t> row_limits{};  // [R] rows past which a dispatch overflows, or empty; -1: none
};

// A case whose shape is still to be chosen: some routes and tokens are masked, some ids are none.
contract::TestCase call_case(std::uint64_t number, int ranks);

class CallRanks {
 public:
  // The configuration of `c`. With nodes: calls take two hops, in phases; the small launches around those
  // that wait are done by the host. With the backend collective: an engine carries what a phase has stored
  // for other ranks, as Lane does over an EngineCarrier; in phases too.
  explicit CallRanks(const contract::TestCase& c);

  void dispatch(const contract::StepInputs& step, const CallForm& form);
  // Combines the rows of the last dispatch, whose inputs `step` has.
  void combine(const contract::StepInputs& step, const oracle::ExpertOutputs& outputs, const CallForm& form);

  // Replaces the plans of the last dispatch, whose inputs `step` has, by those that MAX's arrays of it make.
  void plan_by_source(const contract::StepInputs& step);

  // One dispatch and one combine of the case's inputs number `index`.
  void run_step(int index, const CallForm& form);

  // Dispatches the case's inputs number `index` in which ranks have too little memory, from ids.
  void dispatch_past_row_limits(int index, CallForm form);

  // route_values and return_values by the plan of the last dispatch, whose inputs `step` has.
  void exchange_values(const contract::StepInputs& step);

  // A gather of `rounds` rounds, as far as later calls see it.
  void gather_in_rounds(int rounds);

  const LaneState& state(int rank) const { return ranks_[static_cast<std::size_t>(rank)].state; }
  const PlanView& plan(int rank) const { return ranks_[static_cast<std::size_t>(rank)].plan; }
  std::int32_t size() const { return static_cast<std::int32_t>(ranks_.size()); }

 private:
  struct alignas(128) Line {
    std::byte bytes[128];
  };
  using Memory = std::vector<Line>;
  static constexpr std::byte kPoison{0xA5};           // of memory that a call has to write
  static constexpr unsigned kBlocks = kWide ? 3 : 4;  // of a launch
  static std::byte* at(Memory& memory) { return reinterpret_cast<std::byte*>(memory.data()); }
  static Memory of_bytes(std::int64_t bytes, std::byte value);
  static std::vector<std::byte> bytes_at(const void* memory, std::size_t count) {
    const auto* const from = static_cast<const std::byte*>(memory);
    return {from, from + count};
  }

  struct Rank {
    Memory symmetric, tables, block_counts, block_counted, plan_memory;
    std::vector<std::int64_t> load;
    std::vector<std::byte*> sections;  // of all ranks
    Epoch epoch{};
    LaneState state{};
    unsigned timeout_claimed = 0;
    HostSignals report{};
    DeviceError error{};
    alignas(16) HostTotals totals{};
    LaneView view{};
    PlanView plan{};
    // State of the last dispatch.
    Memory inputs[kMaxParts], parts[kMaxParts];
    std::byte* received[kMaxParts] = {};
    std::vector<std::int32_t> ids, local_ids, counts, row_offsets, group_of_row;
    std::vector<float> weight;
    std::int32_t tokens = 0;
    // Two hops, or an engine.
    EngineLayout engine{};
    Memory engine_memory, windows;
    std::vector<std::byte> hop_states;
    HopCounts hop_counts[4] = {};
    std::uint32_t hop_agreed = 0;
  };

  void make_view(int rank);
  // `sections` [R]: stays where it is while large groups use the view.
  static void place_sections(std::vector<std::byte*>& sections, LaneView* view);
  // Two hops, or an engine: as the functions of Lane.
  void place_hops();
  void place_lanes();
  void place_messages(DispatchArguments& call, int rank);
  void place_rows(CombineArguments& call, int rank);
  void add_on_nodes(CombineArguments& call, int rank);
  HopArguments hop_arguments(int rank, HopContent content);
  bool carried() const { return config_.backend == BackendKind::collective; }
  void carry_headers();
  void carry_messages(const std::vector<DispatchArguments>& calls, const CallForm& form);
  void carry_rows(const std::vector<CombineArguments>& calls);
  void run_hops(const std::vector<HopArguments>& calls, std::uint64_t seed);
  // Each rank's values `from` its routes or rows; returns those of its rows or routes, as many as `sizes`.
  std::vector<std::vector<float>> run_values(Operation operation, const std::vector<std::vector<float>>& from,
                                             const std::vector<std::size_t>& sizes);
  DispatchArguments dispatch_arguments(const contract::StepInputs& step, int rank, const CallForm& form);
  void compare_dispatch(const contract::StepInputs& step, int rank);
  void compare_overflow(const oracle::RowPositions& positions, int rank, const CallForm& form) const;
  CombineArguments combine_arguments(const oracle::ExpertOutputs& outputs, int rank, const CallForm& form);

  contract::TestCase case_;
  Config config_;
  std::optional<Topology> topology_;  // two hops, or an engine
  std::uint64_t calls_ = 0;           // so far
  HopLayout hops_{};
  std::vector<std::byte*> window_sections_;  // of all ranks
  std::deque<Rank> ranks_;
  // Memory of a combine.
  struct Combined {
    Memory outputs, result;
    std::vector<std::byte> residual;  // the result before the call, if it is added to
    std::vector<float> row_weights, topk_weights, row_values, route_values;
  };
  std::deque<Combined> combined_;
};

}  // namespace ferry::cuda
