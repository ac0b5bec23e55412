// Enqueues dispatch and combine on one rank, with all memory of the caller on the device. Nothing waits until
// compare() or require_no_difference(), so a test decides what is in flight, or captures the calls in a
// graph.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cuda/device_compare.hpp"
#include "cuda/device_resources.hpp"
#include "ferry/exchange.hpp"
#include "harness/device_mirror.hpp"
#include "harness/foreign_exchange.hpp"
#include "harness/step_inputs.hpp"
#include "harness/test_case.hpp"
#include "oracle/encode.hpp"

namespace ferry::contract {

class DeviceRun {
 public:
  // Ids are int32, weights are dispatched with the rows, and N and nvfp4's g are read from device memory:
  // `tokens` has max_tokens rows, of which those past N hold what an earlier input set left there.
  // `calls`: makes the calls in place of the exchange, of the same configuration.
  DeviceRun(ferry::Exchange& exchange, const TestCase& c, ForeignExchange* calls = nullptr);

  // Copies the inputs of a step and the experts' outputs to the device. Returns the number of this input set.
  int add_inputs(const StepInputs& step, const oracle::ExpertOutputs& expert_outputs);

  // Gives later combines an epilogue, whose residual is drawn at random.
  void set_epilogue(float scale, bool adds_residual);

  // Enqueues copies that make an input set the inputs of later calls.
  void load(int set, cudaStream_t stream) const;
  // Enqueues filling the outputs with poison.
  void poison_outputs(cudaStream_t stream) const;
  // In phases if the case says so.
  void dispatch(cudaStream_t stream);
  void combine(cudaStream_t stream);
  void dispatch_send(cudaStream_t stream);
  void dispatch_receive(cudaStream_t stream);
  void combine_send(cudaStream_t stream);
  void combine_receive(cudaStream_t stream);

  // All of the above for one input set, and compare().
  void run_and_compare(int set, cudaStream_t stream);

  // Waits for the stream and compares with the oracle. poison_outputs() must precede the calls.
  void compare(int set, cudaStream_t stream);

  // The same on the device, without waiting: compare_on_device() enqueues a comparison with the oracle's
  // bytes, which prepare_comparisons() has stored there for all input sets so far. require_no_difference()
  // waits for all comparisons, and throws if one found a difference.
  void prepare_comparisons();
  void compare_on_device(int set, std::int64_t call, cudaStream_t stream);
  void require_no_difference(cudaStream_t stream) const;

  DispatchOptions& dispatch_options() { return dispatch_options_; }
  CombineOptions& combine_options() { return combine_options_; }
  Tokens& tokens() { return tokens_; }
  Outputs& outputs() { return outputs_; }
  std::int32_t* count() const { return count_.as<std::int32_t>(); }
  std::int32_t* ids() const { return ids_.as<std::int32_t>(); }
  const DispatchResult& received() const { return received_; }
  const DeviceBytes& result_memory() const { return result_; }
  const DeviceBytes& row_memory() const { return rows_[0]; }  // of part 0

 private:
  // Expected results of calls with an input set, as they lie in memory.
  struct Expected {
    std::vector<DeviceBytes> rows;
    DeviceBytes weight, counts, row_offsets, source, result, shared_outputs;
  };
  struct InputSet {
    StepInputs step;
    oracle::ExpertOutputs expert_outputs;
    std::vector<DeviceBytes> tokens;
    DeviceBytes ids, weights, count, global_scale, input_scales, outputs;
    std::unique_ptr<Expected> expected;  // by prepare_comparisons()
  };

  template <class Call>
  decltype(auto) called(const Call& call) {
    return calls_ != nullptr ? call(*calls_) : call(exchange_);
  }
  std::vector<std::byte> rows_image(const StepInputs& step, int part) const;
  std::vector<std::byte> weight_image(const StepInputs& step) const;
  std::vector<std::byte> result_image(const InputSet& set) const;
  std::vector<std::byte> shared_outputs_image(const InputSet& set) const;
  CombineOptions current_combine_options() const;
  void compare_received(const StepInputs& step);
  void compare_result(const InputSet& set) const;

  ferry::Exchange& exchange_;
  ForeignExchange* const calls_;
  const TestCase case_;
  const int rank_;
  const std::int64_t capacity_rows_;
  const std::int64_t slots_;  // weights of a row
  const std::vector<oracle::PartShape> shapes_;
  std::vector<DeviceBytes> tokens_memory_;  // of each part
  DeviceBytes ids_, weights_, count_, global_scale_, input_scales_;
  std::vector<DeviceBytes> rows_;  // of each part
  DeviceBytes weight_, plan_;
  DeviceBytes outputs_memory_, result_, shared_outputs_;
  std::vector<std::byte> residual_values_;  // [max_tokens, H] of the result's type
  std::optional<DeviceBytes> residual_;
  Tokens tokens_;
  Outputs outputs_;
  DispatchOptions dispatch_options_;
  CombineOptions combine_options_;
  DispatchResult received_;
  DeviceMirror mirror_{true};
  std::vector<std::unique_ptr<InputSet>> sets_;
  DeviceComparison comparison_;
};

}  // namespace ferry::contract
