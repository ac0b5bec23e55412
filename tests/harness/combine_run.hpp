// One combine on one rank: the caller's memory, the call, and every byte compared with the reference.
#pragma once

#include <vector>

#include "harness/guarded_buffer.hpp"
#include "harness/step_inputs.hpp"
#include "harness/sync_exchange.hpp"
#include "harness/test_case.hpp"

namespace ferry::contract {

class CombineRun {
 public:
  // `row_weights`: what arrived with the rows (DispatchResult::weight).
  CombineRun(Exchange& exchange, const Case& c, const Step& step, const oracle::Outcome& outcome,
             const Plan& plan, const float* row_weights);

  // The whole call, in halves if the case says so; then compares.
  void run();

  // The halves alone. After the send half the caller's rows are overwritten, as the contract allows.
  void send();
  void receive();
  void compare() const;
  void require_guards() const;  // of everything the call may write or read
  void call();

  CombineOptions& options() { return options_; }
  Result& result() { return result_; }
  Outputs& outputs() { return outputs_; }
  const Buffer& result_memory() const { return result_memory_; }

 private:
  Exchange& exchange_;
  const Case& case_;
  const Step& step_;
  const oracle::Outcome& outcome_;
  int rank_;
  Plan plan_;
  Buffer rows_, weights_, topk_weights_, row_values_, result_memory_, route_values_;
  Outputs outputs_;
  Result result_;
  CombineOptions options_;
};

}  // namespace ferry::contract
