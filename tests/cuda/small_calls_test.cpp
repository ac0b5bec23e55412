// A call pays for the tokens it has, not for those the configuration allows.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaSmallCalls = OnDevices;
using Clock = std::chrono::steady_clock;

constexpr int kCalls = 20;     // of dispatch and of combine in a graph
constexpr int kLaunches = 10;  // of the graph in a batch

// A graph of calls of one token a rank, where `max_tokens` would be allowed.
class OneToken {
 public:
  OneToken(const Rank& rank, const Case& c, int max_tokens)
      : rank_(rank), case_(with(c, max_tokens)), exchange_(rank, case_.config), play_(exchange_, case_) {
    keep_steps(play_, case_, 1);
    play_.use(0, stream_.get());
    play_.poison(stream_.get());
    stream_.synchronize();
    rank.barrier();
    graph_.emplace(stream_.get(), [this] {
      for (int call = 0; call < kCalls; ++call) {
        play_.dispatch(stream_.get());
        play_.combine(stream_.get());
      }
    });
    rank.barrier();
    graph_->launch(stream_.get());
    play_.compare(0, stream_.get());
  }

  // Microseconds of a dispatch and combine.
  double batch() const {
    rank_.barrier();
    const Clock::time_point start = Clock::now();
    for (int launch = 0; launch < kLaunches; ++launch) graph_->launch(stream_.get());
    stream_.synchronize();
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / (kLaunches * kCalls);
  }

 private:
  static Case with(Case c, int max_tokens) {
    c.config.max_tokens = max_tokens;
    return c;
  }

  Rank rank_;
  Case case_;
  ferry::Exchange exchange_;
  DeviceRun play_;
  OwnStream stream_;
  std::optional<Graph> graph_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// In turn, so that both see the same clocks.
TEST_F(CudaSmallCalls, DoNotPayForAllTokensThatCouldBe) {
  constexpr int kBatches = 101;
  Case c = device_case(1, 2);
  c.config.hidden = 1024;
  c.config.capacity = 4096;
  c.tokens = {1, 1};
  run(c.ranks, c, [&](Rank rank) {
    const OneToken small(rank, c, 8), large(rank, c, 8192);
    std::vector<double> of_small, of_large;
    for (int batch = 0; batch < kBatches; ++batch) {
      of_small.push_back(small.batch());
      of_large.push_back(large.batch());
    }
    rank.barrier();
    // Ranks that share a card hold each other up, now more, now less.
    int devices = 0;
    require(cudaGetDeviceCount(&devices) == cudaSuccess, "counting devices");
    const double noise = devices >= c.ranks ? 1.05 : 1.15;
    require(median(of_large) <= noise * median(of_small), "one token takes ", median(of_large),
            " us where 8192 are allowed and ", median(of_small), " us where 8 are");
  });
}

}  // namespace
}  // namespace ferry::contract
