#include "tools/ferry/bench/gpu_timer.hpp"

#include <chrono>
#include <deque>

#include "tools/ferry/bench/inputs.hpp"

namespace ferry::app {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kHostCalls = 1000;
constexpr std::size_t kWarmUps = 3;  // replays that are not counted
// Replays enqueued ahead: enough that the stream never runs empty. A full stream would block in the driver,
// where ranks that share a GPU could wait for each other.
constexpr std::size_t kAhead = 6;

}  // namespace

// The barriers keep graph creation and destruction, which allocate and free device memory, apart from kernels
// of other ranks on the same GPU, which may wait for this thread.
std::vector<double> GpuTimer::in_graphs(const Call& call) const {
  rank_.barrier();
  const GpuGraph graph(stream_, [&] {
    for (int launch = 0; launch < point_.launches; ++launch) call(launch % BenchInputs::kSets);
  });
  std::vector<double> seconds = time_replays([&] { graph.launch(stream_); });
  rank_.barrier();
  return seconds;
}

std::vector<double> GpuTimer::one_by_one(const Call& call) const {
  return time_replays([&] {
    for (int launch = 0; launch < point_.launches; ++launch) call(launch % BenchInputs::kSets);
  });
}

std::vector<double> GpuTimer::time_replays(const std::function<void()>& batch) const {
  std::deque<GpuEvent> events(static_cast<std::size_t>(point_.repetitions) + kWarmUps + 1);
  rank_.barrier();
  events[0].record(stream_);
  for (std::size_t replay = 1; replay < events.size(); ++replay) {
    if (replay > kAhead) events[replay - kAhead].wait();
    batch();
    events[replay].record(stream_);
  }
  wait_();
  std::vector<double> seconds;
  for (std::size_t replay = kWarmUps + 1; replay < events.size(); ++replay)
    seconds.push_back(events[replay].seconds_since(events[replay - 1]) / point_.launches);
  return seconds;
}

double GpuTimer::on_host(const Call& call) const {
  std::vector<double> seconds;
  for (int call_number = 0; call_number < kHostCalls; ++call_number) {
    const Clock::time_point start = Clock::now();
    call(call_number % BenchInputs::kSets);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    wait_();
  }
  return times_of(std::move(seconds)).p50;
}

}  // namespace ferry::app
