#include "tools/ferry/bench/device_bench.hpp"

#include <algorithm>

#include "tools/ferry/bench/gpu_runner.hpp"
#include "tools/ferry/bench/nccl_baseline.hpp"
#include "tools/ferry/bench/traffic.hpp"

namespace ferry::app {

namespace {

using NotesOfRanks = std::vector<std::vector<DeviceNotes>>;  // by rank, by work

NotesOfRanks play_exchange(const DeviceCase& of, const BenchInputs& inputs) {
  int devices = 0;
  cuda::check(cudaGetDeviceCount(&devices), "count the GPUs");
  BenchTables tables(of.point);
  NotesOfRanks notes(static_cast<std::size_t>(of.point.ranks));
  Group group = Group::threads(of.point.ranks);
  group.set_deadline(of.point.config.deadline);
  group.run([&](const Rank& rank) {
    cuda::check(cudaSetDevice(rank.index() % devices), "use a GPU");
    notes[static_cast<std::size_t>(rank.index())] = DevicePlayer(rank, of, inputs, tables).play();
  });
  return notes;
}

DeviceTimes times_of_work(const NotesOfRanks& notes, std::size_t work) {
  DeviceTimes times;
  std::vector<std::vector<double>> seconds;
  for (const std::vector<DeviceNotes>& rank : notes) {
    const DeviceNotes& mine = rank[work];
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

std::vector<DeviceRow> play_device_case(const DeviceCase& of, const std::string& nccl) {
  const BenchInputs inputs(of.point);
  const Crossings crossings = crossings_of(of.point, inputs);
  const auto is_of_nccl = [](const DeviceWork& work) { return work.of_nccl(); };
  NotesOfRanks notes;
  if (!std::all_of(of.works.begin(), of.works.end(), is_of_nccl)) notes = play_exchange(of, inputs);
  std::vector<DeviceRow> rows;
  for (std::size_t i = 0; i < of.works.size(); ++i) {
    const DeviceWork& work = of.works[i];
    DeviceRow row{of.point, inputs.routing(), work, {}};
    if (work.of_nccl()) row.point = with_plain_format(of.point);
    row.times = work.of_nccl() ? play_nccl(row.point, work.work, nccl) : times_of_work(notes, i);
    row.times.floor_bytes = floor_bytes(row.point, work, crossings);
    rows.push_back(row);
  }
  return rows;
}

}  // namespace ferry::app
