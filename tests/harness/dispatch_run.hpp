// One dispatch on one rank: the caller's memory, the call, and every defined byte compared with the
// reference.
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
  DispatchRun(Exchange& exchange, const Case& c, const Step& step);

  // The whole call, in halves if the case says so; then compares and checks what check() reports.
  void run();
  // The same, by a plan instead of ids.
  void run_by(const Plan& plan);

  // combine_backward: the case must weigh rows and want dots. Compares the rows; d_weights is the caller's to
  // compare.
  void run_backward(const Plan& plan, float* d_weights);

  // The halves alone. After the send half the caller's inputs are overwritten, as the contract allows.
  void send(const Plan& plan = {});
  void receive();
  void compare();
  void require_guards() const;  // of all memory that the caller gave

  // The call as it stands, for tests that want it to fail.
  DispatchResult call(const Plan& plan = {});

  DispatchOptions& options() { return options_; }
  Tokens& tokens() { return tokens_; }
  const float* weights();
  Ids ids();

  const DispatchResult& received() const { return received_; }
  const std::vector<Buffer>& part_memory() const { return parts_; }
  // The arrivals' defined values of part `part` of a row, for tests with an idea of their own.
  const std::byte* row(int part, std::int64_t row) const;

 private:
  void make_inputs();
  void make_memory();
  void overwrite_inputs();
  void compare_groups() const;
  void compare_notes() const;
  void compare_part(int part) const;
  void compare_plan() const;
  void compare_inputs() const;
  std::vector<std::byte> background(const void* memory, std::int64_t bytes) const;

  Exchange& exchange_;
  const Case& case_;
  const Step& step_;
  int rank_;
  const oracle::RankInputs& mine_;
  const oracle::RankRows& positions_;
  std::int64_t capacity_rows_;  // all groups together

  std::vector<Buffer> inputs_;
  Buffer ids_, weights_, dot_rows_;
  std::vector<Buffer> parts_;
  Buffer weight_, local_ids_, group_of_row_, plan_, counts_, row_offsets_, dots_;
  std::vector<std::byte> dot_values_;
  Tokens tokens_;
  DispatchOptions options_;
  bool inputs_overwritten_ = false;
  DispatchResult received_;
};

// Calls check() and compares what it throws with what the step must lead to.
void require_diagnostics(Exchange& exchange, int lane, const oracle::RowPositions& positions);

}  // namespace ferry::contract
