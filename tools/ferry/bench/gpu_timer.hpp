// Times the calls of one GPU rank: captured in graphs, issued one by one, or on the calling thread.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "ferry/group.hpp"
#include "tools/ferry/bench/point.hpp"
#include "tools/ferry/common/gpu.hpp"

namespace ferry::app {

// Cycles through the input sets. All ranks must time the same call at the same time.
class GpuTimer {
 public:
  using Call = std::function<void(int set)>;
  using Wait = std::function<void()>;

  // `wait` returns when the stream is empty, and throws any error of the calls.
  GpuTimer(const Rank& rank, const BenchPoint& point, const cuda::CudaStream& stream, Wait wait)
      : rank_(rank), point_(point), stream_(stream), wait_(std::move(wait)) {}

  // Seconds of a call by replay, measured with events on the stream. A replay is BenchPoint::launches calls,
  // as one graph or issued one by one. Replays follow each other without waiting for the host.
  std::vector<double> in_graphs(const Call& call) const;
  std::vector<double> one_by_one(const Call& call) const;

  // Seconds that the calling thread spends in a call while the stream is empty: median of 1,000 calls.
  double on_host(const Call& call) const;

 private:
  std::vector<double> time_replays(const std::function<void()>& batch) const;

  Rank rank_;
  const BenchPoint& point_;
  const cuda::CudaStream& stream_;
  Wait wait_;
};

}  // namespace ferry::app
