#include "tools/ferry/limits/gpu_limits.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "tools/ferry/common/files.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

GpuLimits measure_gpu_limits(int ranks, const std::vector<int>& sms) {
  GpuLimits limits;
  limits.gpus = gpu_names();
  limits.ranks = ranks;
  const int all = gpu_sms();
  std::set<int> counts{all};
  for (const int common : {1, 2, 4, 8, 16, 24, 32, 64}) counts.insert(std::min(common, all));
  for (const int requested : sms)
    if (requested > 0) counts.insert(std::min(requested, all));
  Progress progress("measuring", static_cast<std::int64_t>(counts.size()) + 5);
  progress.show();
  for (const int count : counts) {
    limits.push.emplace_back(count, measure_push(ranks, count));
    progress.advance();
  }
  limits.flag_seconds = measure_gpu_flag();
  progress.advance();
  limits.barrier_seconds = measure_gpu_barrier(ranks);
  progress.advance();
  for (const int blocks : {1, 16, all}) {
    limits.launch.emplace_back(blocks, measure_launch(blocks));
    progress.advance();
  }
  return limits;
}

double best_push(const GpuLimits& limits, int sm_limit) {
  double best = 0;
  for (const auto& [sms, bytes] : limits.push)
    if (sm_limit == 0 || sms <= sm_limit) best = std::max(best, bytes);
  return best;
}

std::string table_of(const GpuLimits& limits) {
  std::string text =
      fmt::format("Machine   {} x {}; {}, assigned to the GPUs round robin\n", limits.gpus.size(),
                  limits.gpus.front(), report::counted(limits.ranks, "rank"));
  for (const auto& [sms, bytes] : limits.push) {
    text += fmt::format("push      {:<23} {:>12}  out of each rank, all ranks at once\n",
                        report::counted(sms, "SM"), report::in_bytes_per_second(bytes));
  }
  text += fmt::format("flag      {:<23} {:>12}  one way\n", "", report::in_time(limits.flag_seconds * 1e6));
  text += fmt::format("barrier   {:<23} {:>12}\n", report::counted(limits.ranks, "rank"),
                      report::in_time(limits.barrier_seconds * 1e6));
  for (const auto& [blocks, seconds] : limits.launch) {
    text += fmt::format("launch    {:<23} {:>12}\n", report::counted(blocks, "block"),
                        report::in_time(seconds * 1e6));
  }
  return text;
}

nlohmann::ordered_json json_of(const GpuLimits& limits) {
  nlohmann::ordered_json json = report_json("ferry.limits.cuda", 1);
  json["gpus"] = limits.gpus;
  json["ranks"] = limits.ranks;
  for (const auto& [sms, bytes] : limits.push)
    json["push"].push_back({{"sms", sms}, {"bytes_per_second", bytes}});
  json["flag_one_way_seconds"] = limits.flag_seconds;
  json["barrier_seconds"] = limits.barrier_seconds;
  for (const auto& [blocks, seconds] : limits.launch)
    json["launch"].push_back({{"blocks", blocks}, {"seconds", seconds}});
  return json;
}

}  // namespace ferry::app
