// Runs one combine on one rank and compares every output byte with the oracle.
#pragma once

#include <vector>

#include "harness/guarded_buffer.hpp"
#include "harness/step_inputs.hpp"
#include "harness/sync_exchange.hpp"
#include "harness/test_case.hpp"

namespace ferry::contract {

class CombineRun {
 public:
  // `row_weights`: the weights that dispatch returned (DispatchResult::weight), or null.
  CombineRun(SyncExchange& exchange, const TestCase& c, const StepInputs& step,
             const oracle::ExpertOutputs& expert_outputs, const Plan& plan, const float* row_weights);

  // The whole call, in two phases if the case says so, then compare() and SyncExchange::check().
  void run();

  // The phases alone. send() then overwrites the rows, which the contract allows from then on.
  void send();
  void receive();
  void compare() const;
  void require_guards() const;  // of all memory that the call may access
  void call();                  // the fused call alone

  CombineOptions& options() { return options_; }
  Result& result() { return result_; }
  Outputs& outputs() { return outputs_; }
  const GuardedBuffer& result_memory() const { return result_memory_; }
  const GuardedBuffer& shared_outputs() const { return shared_outputs_; }

 private:
  SyncExchange& exchange_;
  const TestCase& case_;
  const StepInputs& step_;
  const oracle::ExpertOutputs& expert_outputs_;
  int rank_;
  Plan plan_;
  GuardedBuffer rows_, weights_, topk_weights_, row_values_, result_memory_, route_values_, shared_outputs_;
  Outputs outputs_;
  Result result_;
  CombineOptions options_;
};

}  // namespace ferry::contract
