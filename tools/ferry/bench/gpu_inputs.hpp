// What the calls of a bench read and write on one GPU rank: a memory for every set of inputs.
#pragma once

#include <array>
#include <vector>

#include "ferry/exchange.hpp"
#include "tools/ferry/bench/gpu_rows.hpp"
#include "tools/ferry/bench/tables.hpp"
#include "tools/ferry/common/gpu.hpp"

namespace ferry::app {

struct DeviceSet {
  DeviceArray tokens, ids, weights;
  DeviceArray plan, row_weights;
  DeviceArray outputs;              // the experts' rows
  DeviceArray messages;             // of all ranks' tokens, what arrived rows are compared with
  std::vector<RowPlace> positions;  // of the rows that arrive
};

class DeviceSets {
 public:
  DeviceSets(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs);

  // Fills every set but for what follows from its dispatch. Collective.
  void bring(BenchTables& tables);

  // Where the rows of a dispatch lie, and their weights. DispatchResult are on the host.
  void keep_places(int set, const DispatchResult& local);

  // Experts that leave rows as they are: every row is its token again. `rows`: that outputs have room for.
  // Collective.
  void bring_outputs(BenchTables& tables, std::int64_t rows, const DeviceStream& stream);

  // Throws CheckFailed unless every byte that arrived is right. Waits for the stream.
  void check_bytes(int set, const DispatchResult& on_device, const DeviceStream& stream);

  DeviceSet& operator[](int set) { return sets_[static_cast<std::size_t>(set)]; }

 private:
  void take_places(const std::vector<RowPlace>& positions);

  Rank rank_;
  const BenchPoint& point_;
  const BenchInputs& inputs_;
  std::array<DeviceSet, BenchInputs::kSets> sets_;
  DeviceArray positions_;  // those of the set that is looked at
  DeviceArray wrong_;
};

}  // namespace ferry::app
