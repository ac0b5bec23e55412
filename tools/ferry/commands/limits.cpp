// ferry limits: what this machine can move, whatever the software.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "ferry/version.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/common/memcpy_rate.hpp"
#include "tools/ferry/common/output.hpp"
#include "tools/ferry/common/progress.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"
#include "tools/ferry/limits/signals.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

constexpr const char* kLimitsFooter =
    R"(memcpy   bytes read plus bytes written a second, buffers touched before and larger than the caches
flag     one rank raises a flag in shared memory, the other waits for it: one way
barrier  all ranks meet
push     cuda: bytes a second out of each rank while all ranks write to all others at once, by SMs of a rank
launch   cuda: an empty kernel in a graph

Examples:
  ferry limits
  ferry limits --ranks 4 --json -
  ferry limits --backend cuda --ranks 4
)";

struct Copying {
  int threads;
  double bytes_per_second;
};

struct Flag {
  const char* group;
  const char* waiting;
  double seconds;
};

struct Barrier {
  const char* group;
  int ranks;
  double seconds;
};

struct Limits {
  std::vector<Copying> memcpy;
  std::vector<Flag> flags;
  std::vector<Barrier> barriers;
};

Group group_of(const std::string& kind, int ranks) {
  return kind == "processes" ? Group::processes(ranks) : Group::threads(ranks);
}

// 1, 2, 4 ... up to the cores, and the ranks asked for.
std::set<int> thread_counts(int ranks) {
  std::set<int> counts{cores(), ranks};
  for (int threads = 1; threads < cores(); threads *= 2) counts.insert(threads);
  return counts;
}

// Processes are forked, so their measurements come before those that start threads.
Limits measure(int ranks) {
  const std::set<int> threads = thread_counts(ranks);
  Progress progress("measuring", static_cast<std::int64_t>(threads.size()) + 6);
  progress.show();
  Limits limits;
  for (const char* kind : {"processes", "threads"}) {
    Group two = group_of(kind, 2);
    limits.flags.push_back({kind, "spinning", measure_flag(two, Waiting::spinning)});
    progress.advance();
    limits.flags.push_back({kind, "sleeping", measure_flag(two, Waiting::sleeping)});
    progress.advance();
    Group all = group_of(kind, ranks);
    limits.barriers.push_back({kind, ranks, measure_barrier(all)});
    progress.advance();
  }
  for (const int count : threads) {
    limits.memcpy.push_back({count, measure_memcpy(count)});
    progress.advance();
  }
  return limits;
}

std::string table_of(const Limits& limits) {
  std::string text = fmt::format("Machine   {}, {}, {}\n", cpu_name(), report::counted(cores(), "core"),
                                 report::in_bytes(static_cast<double>(memory_bytes())));
  for (const Copying& one : limits.memcpy) {
    text += fmt::format("memcpy    {:<23} {:>12}  read and written\n", report::counted(one.threads, "thread"),
                        report::in_bytes_per_second(one.bytes_per_second));
  }
  for (const Flag& one : limits.flags) {
    text += fmt::format("flag      {:<10} {:<12} {:>12}  one way\n", one.group, one.waiting,
                        report::in_time(one.seconds * 1e6));
  }
  for (const Barrier& one : limits.barriers) {
    text += fmt::format("barrier   {:<10} {:<12} {:>12}\n", one.group, report::counted(one.ranks, "rank"),
                        report::in_time(one.seconds * 1e6));
  }
  return text;
}

nlohmann::ordered_json json_of(const Limits& limits) {
  nlohmann::ordered_json json{
      {"schema", "ferry.limits"},
      {"schema_version", 1},
      {"ferry_version", std::string(version())},
      {"machine", {{"cpu", cpu_name()}, {"cores", cores()}, {"memory_bytes", memory_bytes()}}}};
  for (const Copying& one : limits.memcpy) {
    json["memcpy"].push_back({{"threads", one.threads}, {"bytes_per_second", one.bytes_per_second}});
  }
  for (const Flag& one : limits.flags) {
    json["flag_one_way"].push_back(
        {{"group", one.group}, {"waiting", one.waiting}, {"seconds", one.seconds}});
  }
  for (const Barrier& one : limits.barriers) {
    json["barrier"].push_back({{"group", one.group}, {"ranks", one.ranks}, {"seconds", one.seconds}});
  }
  return json;
}

void measure_limits(const std::string& backend, int ranks, const std::string& path) {
  const Output json(path);
  if (backend == "cuda") {
    const DeviceLimits limits = measure_device_limits(ranks);
    if (!json.to_stdout()) fmt::print("{}", table_of(limits));
    return json.write(json_of(limits).dump(2) + "\n");
  }
  const Limits limits = measure(ranks);
  if (!json.to_stdout()) fmt::print("{}", table_of(limits));
  json.write(json_of(limits).dump(2) + "\n");
}

}  // namespace

void add_limits(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("limits", "Measure what this machine can move and how fast it signals");
  command->footer(kLimitsFooter);
  struct Options {
    std::string backend = "cpu";
    int ranks = 8;
    std::string json;
  };
  const auto options = std::make_shared<Options>();
  command
      ->add_option("--backend", options->backend,
                   "cpu (default) or cuda: what GPUs push to one another, and their signals")
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""))
      ->type_name("NAME");
  command->add_option("--ranks", options->ranks, "ranks of the barrier and of the pushing, default 8")
      ->check(CLI::Range(2, 1024).description(""))
      ->type_name("N");
  add_output(*command, "--json", options->json, "the report as JSON; - is stdout, instead of the table");
  command->callback([options] { measure_limits(options->backend, options->ranks, options->json); });
}

}  // namespace ferry::app
