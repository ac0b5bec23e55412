// One GPU rank's part in a case of a bench.
#pragma once

#include <vector>

#include "tools/ferry/bench/device_work.hpp"
#include "tools/ferry/bench/gpu_inputs.hpp"
#include "tools/ferry/bench/gpu_timer.hpp"
#include "tools/ferry/common/result_on_host.hpp"

namespace ferry::app {

// What a rank leaves of each work.
struct RankTimes {
  std::vector<double> seconds;  // of a call, by replay
  double host_seconds = 0;      // of the calling thread in an eager call
  std::int64_t wire_bytes = 0;  // of one round over the sets
  std::int64_t rows_checked = 0;
};

class GpuBenchRunner {
 public:
  GpuBenchRunner(const Rank& rank, const GpuCase& of, const BenchInputs& inputs, TokenTables& tables);

  // Checks and times every work of the case, in order; those of NCCL are not its business.
  std::vector<RankTimes> play();

 private:
  static constexpr int kSets = BenchInputs::kSets;

  void prepare();
  bool combines() const;
  RankTimes play(const GpuWork& work);
  void call(const GpuWork& work, int set);
  void dispatch(const GpuWork& work, int set);
  void combine(const GpuWork& work, int set, const float* row_weights);
  // Calls every set once, with poison where results go. Returns the rows compared.
  std::int64_t check(const GpuWork& work);
  void poison(const GpuWork& work, int set);
  std::int64_t check_dispatch(const GpuWork& work, int set);
  std::int64_t check_combine(const GpuWork& work, int set);
  std::int64_t check_metadata(int set);
  std::int64_t wire_bytes() const;

  Rank rank_;
  const GpuCase& case_;
  const BenchPoint& point_;
  const BenchInputs& inputs_;
  TokenTables& tables_;
  Exchange exchange_;
  DeviceStream stream_;
  GpuTimer timer_;
  GpuInputs sets_;
  GpuBuffer result_;
  GpuBuffer counts_;  // of a step, by set
  std::vector<std::byte> result_on_host_;
  ResultOnHost result_on_host_;
  DispatchResult received_;  // of the last dispatch
  const StepMetadata* metadata_ = nullptr;
};

}  // namespace ferry::app
