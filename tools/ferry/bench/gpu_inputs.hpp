// The input sets of a GPU benchmark in device memory, and the comparison of received rows there.
#pragma once

#include <array>
#include <vector>

#include "ferry/exchange.hpp"
#include "tools/ferry/bench/gpu_rows.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/common/gpu.hpp"

namespace ferry::app {

struct GpuInputSet {
  GpuBuffer tokens, ids, weights;
  GpuBuffer plan, row_weights;
  GpuBuffer outputs;                // the experts' rows
  GpuBuffer messages;               // all ranks' tokens as they must be received
  std::vector<RowToken> positions;  // received rows and their tokens
};

class GpuInputs {
 public:
  GpuInputs(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs);

  // Fills tokens, ids, weights, messages and the plan's memory of every set. Collective.
  void upload(TokenTables& tables);

  // Records the row positions and weights of a set's dispatch. `local` is in host memory.
  void record_rows(int set, const DispatchResult& local);

  // Fills the outputs of every set for experts that return their rows unchanged. `rows`: rows to allocate.
  // Collective.
  void make_outputs(TokenTables& tables, std::int64_t rows, const cuda::CudaStream& stream);

  // Compares every received byte and waits for the stream. Throws CheckFailed if one is wrong.
  void check_bytes(int set, const DispatchResult& on_device, const cuda::CudaStream& stream);

  GpuInputSet& operator[](int set) { return sets_[static_cast<std::size_t>(set)]; }

 private:
  void write_tables(TokenTables& tables, int set);
  void upload_rows(const std::vector<RowToken>& positions);

  Rank rank_;
  const BenchPoint& point_;
  const BenchInputs& inputs_;
  std::array<GpuInputSet, BenchInputs::kSets> sets_;
  GpuBuffer positions_;  // of the set that is being compared
  GpuBuffer wrong_;
};

}  // namespace ferry::app
