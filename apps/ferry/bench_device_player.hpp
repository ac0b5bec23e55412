// One GPU rank's part in a point of a bench.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "apps/ferry/bench_inputs.hpp"
#include "apps/ferry/device_arrivals.hpp"
#include "apps/ferry/device_resources.hpp"
#include "ferry/exchange.hpp"

namespace ferry::app {

// What a rank leaves: seconds of every replay, and more.
struct DeviceNotes {
  std::vector<double> dispatch, combine;       // seconds of a call, by replay
  double dispatch_host = 0, combine_host = 0;  // seconds of the calling thread for an eager call
  std::int64_t dispatch_wire_bytes = 0, combine_wire_bytes = 0;  // of one round over the sets
  std::int64_t rows = 0, rows_checked = 0;
};

class DevicePlayer {
 public:
  DevicePlayer(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs, DeviceNotes& notes);

  void play();

 private:
  static constexpr int kSets = BenchInputs::kSets;

  struct Set {
    DeviceArray tokens, ids, weights;
    DeviceArray plan, row_weights;
    DeviceArray outputs;  // the experts' rows
  };

  Arrivals dispatch(int set);
  void combine(int set);
  void check(int set);
  void fill_outputs(const Arrivals& local, int set);
  std::vector<double> time(const std::function<void(int set)>& call);
  double time_host(const std::function<void(int set)>& call);

  Rank rank_;
  const BenchPoint& point_;
  const BenchInputs& inputs_;
  DeviceNotes& notes_;
  Exchange exchange_;
  DeviceStream stream_;
  std::array<Set, kSets> sets_;
  DeviceArray result_;
  ArrivalsOnHost arrivals_on_host_;
};

}  // namespace ferry::app
