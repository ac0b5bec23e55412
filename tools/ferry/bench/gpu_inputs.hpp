// What the calls of a bench read and write on one GPU rank: a memory for every set of inputs.
#pragma once

#include <array>
#include <vector>

#include "ferry/exchange.hpp"
#include "tools/ferry/bench/gpu_rows.hpp"
#include "tools/ferry/bench/tables.hpp"
#include "tools/ferry/common/gpu.hpp"

namespace ferry::app {

struct GpuInputSet {
  GpuBuffer tokens, ids, weights;
  GpuBuffer plan, row_weights;
  GpuBuffer outputs;                // the experts' rows
  GpuBuffer messages;               // of all ranks' tokens, what arrived rows are compared with
  std::vector<RowToken> positions;  // of the rows that arrive
};

class GpuInputs {
 public:
  GpuInputs(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs);

  // Fills every set but for what follows from its dispatch. Collective.
  void bring(TokenTables& tables);

  // Where the rows of a dispatch lie, and their weights. DispatchResult are on the host.
  void record_rows(int set, const DispatchResult& local);

  // HostExperts that leave rows as they are: every row is its token again. `rows`: that outputs have room
  // for. Collective.
  void make_outputs(TokenTables& tables, std::int64_t rows, const DeviceStream& stream);

  // Throws CheckFailed unless every byte that arrived is right. Waits for the stream.
  void check_bytes(int set, const DispatchResult& on_device, const DeviceStream& stream);

  GpuInputSet& operator[](int set) { return sets_[static_cast<std::size_t>(set)]; }

 private:
  void upload_rows(const std::vector<RowToken>& positions);

  Rank rank_;
  const BenchPoint& point_;
  const BenchInputs& inputs_;
  std::array<GpuInputSet, BenchInputs::kSets> sets_;
  GpuBuffer positions_;  // those of the set that is looked at
  GpuBuffer wrong_;
};

}  // namespace ferry::app
