// One dispatch and the combine after it on one rank, with all of the caller's memory on the device. Calls are
// put on a stream and nothing more: the test decides when to wait and to compare.
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
  // Formats with one part; ids are int32, weights travel with the rows. N is read from device memory.
  DeviceRun(ferry::Exchange& exchange, const Case& c);

  // Takes the inputs of a step and its experts' rows to the device; returns the number of the set.
  int keep(const Step& step, const oracle::Outcome& outcome);

  // Puts on the stream: that the calls read this set from now on.
  void use(int set, cudaStream_t stream) const;
  // That outputs hold poison.
  void poison(cudaStream_t stream) const;
  // The calls.
  void dispatch(cudaStream_t stream);
  void combine(cudaStream_t stream);

  // Waits for the stream and compares with the reference; outputs must have been poisoned before the calls.
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
  struct Set {
    Step step;
    oracle::Outcome outcome;
    DeviceBytes tokens, ids, weights, count, outputs;
  };

  void compare_received(const Step& step);
  void compare_result(const Set& set) const;

  ferry::Exchange& exchange_;
  const Case case_;
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
  CallMemory memory_{true};
  std::vector<std::unique_ptr<Set>> sets_;
};

}  // namespace ferry::contract
