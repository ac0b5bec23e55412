// The time of a call depends on its number of tokens, not on max_tokens.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaSmallCalls = DeviceTest;
using Clock = std::chrono::steady_clock;

constexpr int kCalls = 20;     // dispatches, and combines, in a graph
constexpr int kLaunches = 10;  // of the graph per batch

// A graph of calls with one token per rank, on an exchange with the given max_tokens.
class OneToken {
 public:
  OneToken(const Rank& rank, const TestCase& c, int max_tokens)
      : rank_(rank),
        case_(with_max_tokens(c, max_tokens)),
        exchange_(rank, case_.config),
        device_run_(exchange_, case_) {
    add_steps(device_run_, case_, 1);
    device_run_.load(0, stream_.get());
    device_run_.poison_outputs(stream_.get());
    stream_.synchronize();
    rank.barrier();
    graph_.emplace(stream_.get(), [this] {
      for (int call = 0; call < kCalls; ++call) {
        device_run_.dispatch(stream_.get());
        device_run_.combine(stream_.get());
      }
    });
    rank.barrier();
    graph_->launch(stream_.get());
    device_run_.compare(0, stream_.get());
  }

  // Mean time of a dispatch and combine, in microseconds.
  double time_batch() const {
    rank_.barrier();
    const Clock::time_point start = Clock::now();
    for (int launch = 0; launch < kLaunches; ++launch) graph_->launch(stream_.get());
    stream_.synchronize();
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / (kLaunches * kCalls);
  }

 private:
  static TestCase with_max_tokens(TestCase c, int max_tokens) {
    c.config.max_tokens = max_tokens;
    return c;
  }

  Rank rank_;
  TestCase case_;
  ferry::Exchange exchange_;
  DeviceRun device_run_;
  TestStream stream_;
  std::optional<Graph> graph_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The two exchanges are timed alternately, so that both see the same clock frequencies.
TEST_F(CudaSmallCalls, TimeDoesNotGrowWithMaxTokens) {
  constexpr int kBatches = 101;
  TestCase c = device_case(1, 2);
  c.config.hidden = 1024;
  c.config.capacity = 4096;
  c.tokens = {1, 1};
  run(c.ranks, c, [&](Rank rank) {
    const OneToken small(rank, c, 8), large(rank, c, 8192);
    std::vector<double> small_times, large_times;
    for (int batch = 0; batch < kBatches; ++batch) {
      small_times.push_back(small.time_batch());
      large_times.push_back(large.time_batch());
    }
    rank.barrier();
    // Ranks that share a device delay each other by varying amounts.
    int devices = 0;
    require(cudaGetDeviceCount(&devices) == cudaSuccess, "counting devices");
    const double tolerance = devices >= c.ranks ? 1.05 : 1.15;
    require(median(large_times) <= tolerance * median(small_times), "one token takes ", median(large_times),
            " us with max_tokens = 8192 and ", median(small_times), " us with max_tokens = 8");
  });
}

}  // namespace
}  // namespace ferry::contract
