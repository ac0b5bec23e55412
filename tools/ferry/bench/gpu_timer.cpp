#include "tools/ferry/bench/gpu_timer.hpp"

#include <chrono>
#include <deque>

#include "tools/ferry/bench/inputs.hpp"

namespace ferry::app {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kHostCalls = 1000;
constexpr std::size_t kWarming = 3;  // replays before those that count
// Replays that are put on the stream before the first of them has ended: enough that it never runs dry. A
// full stream would block inside the driver, where ranks that share a card might wait for one another.
constexpr std::size_t kAhead = 6;

}  // namespace

// Ranks meet before and after what allocates or frees on a card whose kernels may wait for this thread.
std::vector<double> GpuTimer::in_graphs(const Call& call) const {
  rank_.barrier();
  const GpuGraph graph(stream_, [&] {
    for (int launch = 0; launch < point_.launches; ++launch) call(launch % BenchInputs::kSets);
  });
  std::vector<double> seconds = replay([&] { graph.launch(stream_); });
  rank_.barrier();
  return seconds;
}

std::vector<double> GpuTimer::one_by_one(const Call& call) const {
  return replay([&] {
    for (int launch = 0; launch < point_.launches; ++launch) call(launch % BenchInputs::kSets);
  });
}

std::vector<double> GpuTimer::replay(const std::function<void()>& batch) const {
  std::deque<GpuEvent> marks(static_cast<std::size_t>(point_.repetitions) + kWarming + 1);
  rank_.barrier();
  marks[0].record(stream_);
  for (std::size_t number = 1; number < marks.size(); ++number) {
    if (number > kAhead) marks[number - kAhead].wait();
    batch();
    marks[number].record(stream_);
  }
  wait_();
  std::vector<double> seconds;
  for (std::size_t number = kWarming + 1; number < marks.size(); ++number)
    seconds.push_back(marks[number].seconds_since(marks[number - 1]) / point_.launches);
  return seconds;
}

double GpuTimer::on_host(const Call& call) const {
  std::vector<double> seconds;
  for (int number = 0; number < kHostCalls; ++number) {
    const Clock::time_point start = Clock::now();
    call(number % BenchInputs::kSets);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    wait_();
  }
  return percentile(std::move(seconds), 0.5);
}

}  // namespace ferry::app
