// Times calls of one GPU rank.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "ferry/group.hpp"
#include "tools/ferry/bench/point.hpp"
#include "tools/ferry/common/gpu.hpp"

namespace ferry::app {

// Calls take turns with the sets of inputs: `call` puts one on the stream, `wait` returns when the stream is
// empty and throws what went wrong. All ranks time the same thing together.
class GpuTimer {
 public:
  using Call = std::function<void(int set)>;
  using Wait = std::function<void()>;

  GpuTimer(const Rank& rank, const BenchPoint& point, const DeviceStream& stream, Wait wait)
      : rank_(rank), point_(point), stream_(stream), wait_(std::move(wait)) {}

  // Seconds of a call by replay, on this rank's stream, of BenchPoint::launches calls that are one graph, or
  // are put there one by one. Replays follow each other without the host.
  std::vector<double> in_graphs(const Call& call) const;
  std::vector<double> one_by_one(const Call& call) const;

  // Seconds that this thread spends in a call while the stream is empty: median of 1,000.
  double on_host(const Call& call) const;

 private:
  std::vector<double> replay(const std::function<void()>& batch) const;

  Rank rank_;
  const BenchPoint& point_;
  const DeviceStream& stream_;
  Wait wait_;
};

}  // namespace ferry::app
