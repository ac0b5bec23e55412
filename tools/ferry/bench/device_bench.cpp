#include "tools/ferry/bench/device_bench.hpp"

#include <algorithm>

#include "tools/ferry/bench/gpu_runner.hpp"
#include "tools/ferry/bench/nccl_baseline.hpp"
#include "tools/ferry/bench/traffic.hpp"

namespace ferry::app {

namespace {

using TimesOfRanks = std::vector<std::vector<RankTimes>>;  // by rank, by work

TimesOfRanks play_exchange(const GpuCase& of, const BenchInputs& inputs) {
  int devices = 0;
  cuda::check(cudaGetDeviceCount(&devices), "count the GPUs");
  TokenTables tables(of.point);
  TimesOfRanks notes(static_cast<std::size_t>(of.point.ranks));
  Group group = Group::threads(of.point.ranks);
  group.set_deadline(of.point.config.deadline);
  group.run([&](const Rank& rank) {
    cuda::check(cudaSetDevice(rank.index() % devices), "use a GPU");
    notes[static_cast<std::size_t>(rank.index())] = GpuBenchRunner(rank, of, inputs, tables).play();
  });
  return notes;
}

GpuTimes times_of_work(const TimesOfRanks& notes, std::size_t work) {
  GpuTimes times;
  std::vector<std::vector<double>> seconds;
  for (const std::vector<RankTimes>& rank : notes) {
    const RankTimes& mine = rank[work];
    seconds.push_back(mine.seconds);
    times.host_seconds = std::max(times.host_seconds, mine.host_seconds);
    times.wire_bytes += static_cast<double>(mine.wire_bytes);
    times.rows_checked += mine.rows_checked;
  }
  times.seconds = times_of(slowest(seconds));
  times.wire_bytes /= static_cast<double>(notes.size()) * BenchInputs::kSets;
  return times;
}

}  // namespace

std::vector<GpuBenchRow> run_gpu_case(const GpuCase& of, const std::string& nccl) {
  const BenchInputs inputs(of.point);
  const RemoteRows busiest = busiest_remote_rows(of.point, inputs);
  const auto is_of_nccl = [](const GpuWork& work) { return work.of_nccl(); };
  TimesOfRanks notes;
  if (!std::all_of(of.works.begin(), of.works.end(), is_of_nccl)) notes = play_exchange(of, inputs);
  std::vector<GpuBenchRow> rows;
  for (std::size_t i = 0; i < of.works.size(); ++i) {
    const GpuWork& work = of.works[i];
    GpuBenchRow row{of.point, inputs.routing(), work, {}};
    if (work.of_nccl()) row.point = without_quantisation(of.point);
    row.times = work.of_nccl() ? run_nccl_baseline(row.point, work.work, nccl) : times_of_work(notes, i);
    row.times.lower_bound_bytes = lower_bound_bytes(row.point, work, busiest);
    rows.push_back(row);
  }
  return rows;
}

}  // namespace ferry::app
