// Enqueues dispatch and combine on one rank, with all memory of the caller on the device. Nothing waits until
// compare(), so a test decides what is in flight, or captures the calls in a graph.
#pragma once

#include <memory>
#include <vector>

#include "cuda/device_resources.hpp"
#include "ferry/exchange.hpp"
#include "harness/device_mirror.hpp"
#include "harness/step_inputs.hpp"
#include "harness/test_case.hpp"

namespace ferry::contract {

class DeviceRun {
 public:
  // For formats with one part. Ids are int32, weights are dispatched with the rows, and N is read from device
  // memory.
  DeviceRun(ferry::Exchange& exchange, const TestCase& c);

  // Copies the inputs of a step and the experts' outputs to the device. Returns the number of this input set.
  int add_inputs(const StepInputs& step, const oracle::ExpertOutputs& expert_outputs);

  // Enqueues copies that make an input set the inputs of later calls.
  void load(int set, cudaStream_t stream) const;
  // Enqueues filling the outputs with poison.
  void poison_outputs(cudaStream_t stream) const;
  void dispatch(cudaStream_t stream);
  void combine(cudaStream_t stream);

  // All of the above for one input set, and compare().
  void run_and_compare(int set, cudaStream_t stream);

  // Waits for the stream and compares with the oracle. poison_outputs() must precede the calls.
  void compare(int set, cudaStream_t stream);

  DispatchOptions& dispatch_options() { return dispatch_options_; }
  CombineOptions& combine_options() { return combine_options_; }
  Tokens& tokens() { return tokens_; }
  Outputs& outputs() { return outputs_; }
  std::int32_t* count() const { return count_.as<std::int32_t>(); }
  std::int32_t* ids() const { return ids_.as<std::int32_t>(); }
  const DispatchResult& received() const { return received_; }
  const DeviceBytes& result_memory() const { return result_; }
  const DeviceBytes& row_memory() const { return rows_; }

 private:
  struct InputSet {
    StepInputs step;
    oracle::ExpertOutputs expert_outputs;
    DeviceBytes tokens, ids, weights, count, outputs;
  };

  void compare_received(const StepInputs& step);
  void compare_result(const InputSet& set) const;

  ferry::Exchange& exchange_;
  const TestCase case_;
  const int rank_;
  const std::int64_t capacity_rows_;
  const std::int64_t token_bytes_, row_bytes_, output_bytes_, result_bytes_;
  DeviceBytes tokens_memory_, ids_, weights_, count_;
  DeviceBytes rows_, weight_, plan_;
  DeviceBytes outputs_memory_, result_;
  Tokens tokens_;
  Outputs outputs_;
  DispatchOptions dispatch_options_;
  CombineOptions combine_options_;
  DispatchResult received_;
  DeviceMirror mirror_{true};
  std::vector<std::unique_ptr<InputSet>> sets_;
};

}  // namespace ferry::contract
