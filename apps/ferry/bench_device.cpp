#include "apps/ferry/bench_device.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "apps/ferry/bench_device_player.hpp"
#include "apps/ferry/bench_floor.hpp"
#include "apps/ferry/device_limits.hpp"

namespace ferry::app {

namespace {

// Nearest-rank percentile.
double percentile(std::vector<double> values, double p) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(p * static_cast<double>(values.size() - 1) + 0.5)];
}

// Every replay as long as on its slowest rank.
BenchTimes times_of(const std::vector<DeviceNotes>& notes, std::vector<double> DeviceNotes::* what) {
  std::vector<double> slowest((notes[0].*what).size());
  for (const DeviceNotes& rank : notes) {
    for (std::size_t replay = 0; replay < slowest.size(); ++replay)
      slowest[replay] = std::max(slowest[replay], (rank.*what)[replay]);
  }
  return {.p50 = percentile(slowest, 0.5), .p99 = percentile(slowest, 0.99)};
}

double greatest(const std::vector<DeviceNotes>& notes, double DeviceNotes::* what) {
  double most = 0;
  for (const DeviceNotes& rank : notes) most = std::max(most, rank.*what);
  return most;
}

double sum(const std::vector<DeviceNotes>& notes, std::int64_t DeviceNotes::* what) {
  double total = 0;
  for (const DeviceNotes& rank : notes) total += static_cast<double>(rank.*what);
  return total;
}

// The best that ranks push with at most so many SMs; measured once for each number of ranks and limit.
double push_limit(int ranks, int sm_limit) {
  static std::map<std::pair<int, int>, double> known;
  const auto [entry, fresh] = known.try_emplace({ranks, sm_limit}, 0);
  if (!fresh) return entry->second;
  const int most = sm_limit > 0 ? std::min(sm_limit, gpu_sms()) : gpu_sms();
  for (int sms = most; sms >= 1; sms /= 2) entry->second = std::max(entry->second, measure_push(ranks, sms));
  return entry->second;
}

}  // namespace

BenchResult play_device_bench(const BenchPoint& point) {
  const double push = push_limit(point.ranks, point.sm_limit);
  const BenchInputs inputs(point);
  std::vector<DeviceNotes> notes(static_cast<std::size_t>(point.ranks));
  const int devices = static_cast<int>(gpu_names().size());
  Group group = Group::threads(point.ranks);
  group.set_deadline(point.config.deadline);
  group.run([&](const Rank& rank) {
    cuda::check(cudaSetDevice(rank.index() % devices), "use a GPU");
    DevicePlayer(rank, point, inputs, notes[static_cast<std::size_t>(rank.index())]).play();
  });

  BenchResult result;
  result.routing = inputs.routing();
  result.rows = sum(notes, &DeviceNotes::rows) / BenchInputs::kSets;
  result.rows_checked = static_cast<std::int64_t>(sum(notes, &DeviceNotes::rows_checked));
  result.push_bytes_per_second = push;
  const BenchFloor floor = floor_of(point, inputs);
  result.dispatch = {.seconds = times_of(notes, &DeviceNotes::dispatch),
                     .wire_bytes = sum(notes, &DeviceNotes::dispatch_wire_bytes) / BenchInputs::kSets,
                     .floor_seconds = push > 0 ? floor.dispatch_bytes / push : 0,
                     .host_seconds = greatest(notes, &DeviceNotes::dispatch_host)};
  result.combine = {.seconds = times_of(notes, &DeviceNotes::combine),
                    .wire_bytes = sum(notes, &DeviceNotes::combine_wire_bytes) / BenchInputs::kSets,
                    .floor_seconds = push > 0 ? floor.combine_bytes / push : 0,
                    .host_seconds = greatest(notes, &DeviceNotes::combine_host)};
  return result;
}

}  // namespace ferry::app
