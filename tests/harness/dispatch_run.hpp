// Runs one dispatch on one rank and compares every defined output byte with the oracle.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "harness/guarded_buffer.hpp"
#include "harness/step_inputs.hpp"
#include "harness/sync_exchange.hpp"
#include "harness/test_case.hpp"

namespace ferry::contract {

class DispatchRun {
 public:
  DispatchRun(SyncExchange& exchange, const TestCase& c, const StepInputs& step);

  // The whole call, in two phases if the case says so, then compare() and the errors that check() must
  // report.
  void run();
  // The same, with a plan instead of expert ids.
  void run_with_plan(const Plan& plan);

  // combine_backward; the case must have `apply_weights` and `dots`. Compares the rows; the caller compares
  // `d_weights`.
  void run_backward(const Plan& plan, float* d_weights);

  // The phases alone. send() then overwrites the inputs, which the contract allows from then on.
  void send(const Plan& plan = {});
  void receive();
  void compare();
  void require_guards() const;  // of all memory that was given to the call

  // The fused call alone, for tests in which it must fail.
  DispatchResult call(const Plan& plan = {});

  DispatchOptions& options() { return options_; }
  Tokens& tokens() { return tokens_; }
  // Null on odd ranks without tokens, whose options say instead that the call has weights.
  const float* weights();
  Ids ids();

  const DispatchResult& received() const { return received_; }
  const std::vector<GuardedBuffer>& part_memory() const { return parts_; }
  // Part `part` of a received row.
  const std::byte* row(int part, std::int64_t row) const;

 private:
  // An array of tokens that this rank passes.
  struct PassedPart {
    const std::vector<std::byte>& rows;
    std::int64_t row_bytes;
  };
  std::vector<PassedPart> passed_parts() const;
  void allocate_inputs();
  std::int64_t part_rows() const;
  void allocate_outputs();
  void overwrite_inputs();
  void compare_groups() const;
  void compare_count_sums() const;
  void compare_metadata() const;
  void compare_index() const;
  void compare_part(int part) const;
  void compare_plan() const;
  void compare_inputs() const;
  std::vector<std::byte> unwritten(const void* memory, std::int64_t bytes) const;

  SyncExchange& exchange_;
  const TestCase& case_;
  const StepInputs& step_;
  int rank_;
  const oracle::RankInputs& my_inputs_;
  const oracle::RankRows& my_rows_;
  std::int64_t capacity_rows_;  // of all groups together

  std::vector<GuardedBuffer> inputs_;
  GuardedBuffer ids_, weights_, dot_rows_, global_scale_, input_scales_;
  std::vector<GuardedBuffer> parts_;
  GuardedBuffer weight_, local_ids_, group_of_row_, plan_, counts_, row_offsets_, dots_, count_sums_;
  std::vector<std::byte> dot_values_;
  Tokens tokens_;
  DispatchOptions options_;
  bool inputs_overwritten_ = false;
  DispatchResult received_;
};

// Requires that check() reports exactly the overflow and bad ids that the oracle expects.
void require_diagnostics(SyncExchange& exchange, int lane, const oracle::RowPositions& positions);

}  // namespace ferry::contract
