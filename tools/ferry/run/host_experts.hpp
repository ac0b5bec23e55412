// The experts of `ferry run` on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "memory/local_memory.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/swiglu.hpp"

namespace ferry::app {

// The experts of one rank, as DeviceContext describes them, with memory for their outputs.
class HostExperts {
 public:
  // `capacity`: the most rows that can be received. Pages are allocated as rows touch them.
  HostExperts(const RunSpec& spec, int rank, std::int64_t capacity);

  void scale(const DispatchResult& received);
  void swiglu(const DispatchResult& received);

  Outputs outputs() const { return {.data = outputs_.data(), .type = spec_.type}; }

 private:
  // A received row that an expert processes, with the weight that rank_major applies here.
  struct Routed {
    std::int64_t row;
    float weight;
  };

  void load_row(const DispatchResult& received, std::int64_t row, float* values) const;
  void load_quantised_row(const DispatchResult& received, std::int64_t row, float* values) const;
  void store_row(std::int64_t row, const float* values);
  void accumulate(float weight, float* values, float* sum) const;
  void group_rows(const DispatchResult& received);
  void apply_swiglu(const DispatchResult& received, int expert, const std::vector<Routed>& rows);

  const RunSpec& spec_;
  bool rank_major_;
  std::int64_t hidden_;
  LocalMemory outputs_;                              // [capacity, hidden] of RunSpec::type
  LocalMemory sums_;                                 // rank_major: [capacity, hidden] fp32
  std::vector<int> experts_;                         // the shared ones, then this rank's
  std::vector<std::vector<Routed>> rows_of_expert_;  // of each of experts_
  std::vector<float> in_, out_;
  Swiglu swiglu_;
};

}  // namespace ferry::app
