// A call pays for the tokens it has, not for those the configuration allows.
#include <algorithm>
#include <chrono>

#include "cuda/fixture.hpp"

namespace ferry::contract {
namespace {

using CudaSmallCalls = OnDevices;
using Clock = std::chrono::steady_clock;

// Median over batches, in microseconds a dispatch and combine of one token a rank, in a graph.
double time_of_one_token(const Rank& rank, const Case& c, int max_tokens) {
  constexpr int kBatches = 15, kCalls = 20, kLaunches = 10;
  Case sized = c;
  sized.config.max_tokens = max_tokens;
  ferry::Exchange exchange(rank, sized.config);
  DevicePlay play(exchange, sized);
  const Step step = make_step(sized);
  play.keep(step, make_outcome(sized, step));
  const OwnStream stream;
  play.use(0, stream.get());
  play.poison(stream.get());
  rank.barrier();
  const Graph graph(stream.get(), [&] {
    for (int call = 0; call < kCalls; ++call) {
      play.dispatch(stream.get());
      play.combine(stream.get());
    }
  });
  rank.barrier();
  graph.launch(stream.get());
  play.compare(0, stream.get());
  std::vector<double> batches;
  for (int batch = 0; batch < kBatches; ++batch) {
    rank.barrier();
    const Clock::time_point start = Clock::now();
    for (int launch = 0; launch < kLaunches; ++launch) graph.launch(stream.get());
    stream.wait();
    batches.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() /
                      (kLaunches * kCalls));
  }
  std::sort(batches.begin(), batches.end());
  return batches[kBatches / 2];
}

TEST_F(CudaSmallCalls, DoNotPayForAllTokensThatCouldBe) {
  Case c = device_case(1, 2);
  c.config.hidden = 1024;
  c.config.capacity = 4096;
  c.tokens = {1, 1};
  run(c.ranks, c, [&](Rank rank) {
    const double small = time_of_one_token(rank, c, 16), large = time_of_one_token(rank, c, 16384);
    require(large < 1.5 * small + 2, "one token takes ", large, " us where 16384 are allowed and ", small,
            " us where 16 are");
  });
}

}  // namespace
}  // namespace ferry::contract
