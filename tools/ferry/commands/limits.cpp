// ferry limits: measures what this machine can move and how fast ranks signal, independent of Ferry's
// exchange.
#include <fmt/core.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/mapping.hpp"
#include "ferry/group.hpp"
#include "group/control_block.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

constexpr const char* kLimitsFooter =
    R"(memcpy   bytes read plus bytes written per second, in buffers larger than the caches
flag     time from one rank's write of a flag in shared memory to another rank's read of it. spinning: the reader
         polls the flag, which needs a core for each rank; sleeping: it sleeps until the writer wakes it, as
         Ferry's ranks do after a while
barrier  time of a barrier of all ranks
push     cuda: bytes per second out of each rank while all ranks write to all others, by SMs per rank
launch   cuda: time of an empty kernel in a graph

Each figure is a median. In brackets (JSON: low, high): between these values lie eight of ten measurements.
Other work on the cores makes figures disagree, such as sleeping faster than spinning: measure on an idle machine.

Examples:
  ferry limits
  ferry limits --ranks 4 --json -
  ferry limits --backend cuda --ranks 4
)";

// ---- signals

using Clock = std::chrono::steady_clock;

constexpr int kBatches = 21;
constexpr int kSignalsPerBatch = 200;
constexpr int kPollsBeforeYield = 4000;

enum class Waiting { spinning, sleeping };

// One rank's flag, which its peer raises, and the event on which the rank sleeps. All zeros is the initial
// state.
struct FlagWithEvent {
  alignas(64) std::atomic<std::uint64_t> flag;
  alignas(64) WakeEvent event;
};

struct PingPong {
  FlagWithEvent flags[2];
  Spread seconds;  // written by rank 0
};

void wait_spinning(const FlagWithEvent& own, std::uint64_t value) {
  for (int polls = 0; own.flag.load(std::memory_order_acquire) < value; ++polls) {
    if (polls % kPollsBeforeYield == kPollsBeforeYield - 1) sched_yield();  // the peer may need this core
  }
}

// The futex protocol of Ferry's own waits: register as a sleeper, read the event's counter, check the flag
// once more, then sleep. A peer that raises the flag after that check finds the sleeper and wakes it.
void wait_sleeping(FlagWithEvent& own, std::uint64_t value) {
  while (own.flag.load(std::memory_order_seq_cst) < value) {
    own.event.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t rings = own.event.rings.load(std::memory_order_seq_cst);
    if (own.flag.load(std::memory_order_seq_cst) < value) futex_wait(own.event.rings, rings, 1.0);
    own.event.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void raise(FlagWithEvent& peer, std::uint64_t value) {
  peer.flag.store(value, std::memory_order_seq_cst);  // WakeEvent::ring() requires seq_cst
  peer.event.ring();
}

// Calls signal(n) in batches, n = 1, 2, ...; returns the seconds of one call, by batch.
template <class Signal>
Spread seconds_of(Signal&& signal) {
  std::vector<double> batches;
  std::uint64_t number = 0;
  for (int batch = 0; batch < kBatches; ++batch) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kSignalsPerBatch; ++i) signal(++number);
    batches.push_back(std::chrono::duration<double>(Clock::now() - start).count() / kSignalsPerBatch);
  }
  return spread_of(std::move(batches));
}

// Seconds for a flag to travel one way between the two ranks of the group: half of a round trip. A spinning
// rank polls the flag and yields its core now and then; a sleeping rank uses the futex of Ferry's own waits.
Spread measure_flag(Group& group, Waiting waiting) {
  const Mapping memory = Mapping::anonymous_shared(sizeof(PingPong));
  PingPong& shared = *reinterpret_cast<PingPong*>(memory.data());
  group.run([&](const Rank& rank) {
    const int me = rank.index();
    FlagWithEvent& own = shared.flags[me];
    rank.barrier();
    const Spread round_trip = seconds_of([&](std::uint64_t number) {
      if (me == 0) raise(shared.flags[1], number);
      waiting == Waiting::spinning ? wait_spinning(own, number) : wait_sleeping(own, number);
      if (me == 1) raise(shared.flags[0], number);
    });
    if (me == 0) shared.seconds = {round_trip.median / 2, round_trip.low / 2, round_trip.high / 2};
  });
  return shared.seconds;
}

Spread measure_barrier(Group& group) {
  const Mapping memory = Mapping::anonymous_shared(sizeof(Spread));
  Spread& seconds = *reinterpret_cast<Spread*>(memory.data());
  group.run([&](const Rank& rank) {
    const Spread measured = seconds_of([&](std::uint64_t) { rank.barrier(); });
    if (rank.index() == 0) seconds = measured;
  });
  return seconds;
}

// ---- report

struct MemcpyRate {
  int threads;
  Spread bytes_per_second;
};

struct FlagTime {
  const char* group;
  const char* waiting;
  Spread seconds;
};

struct BarrierTime {
  const char* group;
  int ranks;
  Spread seconds;
};

struct HostLimits {
  std::vector<MemcpyRate> memcpy;
  std::vector<FlagTime> flags;  // of each group spinning, then sleeping
  std::vector<BarrierTime> barriers;
};

Group group_of(const std::string& kind, int ranks) {
  return kind == "processes" ? Group::processes(ranks) : Group::threads(ranks);
}

// Thread counts for memcpy: 1, 2, 4 ... up to the number of cores, and `ranks`.
std::set<int> thread_counts(int ranks) {
  std::set<int> counts{cores(), ranks};
  for (int threads = 1; threads < cores(); threads *= 2) counts.insert(threads);
  return counts;
}

// Measures processes before threads, because a process with threads cannot fork ranks.
HostLimits measure_host_limits(int ranks) {
  const std::set<int> threads = thread_counts(ranks);
  Progress progress("measuring", static_cast<std::int64_t>(threads.size()) + 6);
  progress.show();
  HostLimits limits;
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
    limits.memcpy.push_back({count, memcpy_bytes_per_second(count)});
    progress.advance();
  }
  return limits;
}

// The median, and in brackets the values between which eight of ten measurements lie.
std::string shown(const Spread& spread, std::string (*in_unit)(double)) {
  return fmt::format("{:>12}  ({} to {})", in_unit(spread.median), in_unit(spread.low), in_unit(spread.high));
}

std::string in_time(double seconds) {
  return report::in_time(seconds * 1e6);
}

// Whether other work shared the cores meanwhile: spinning was slower than sleeping although every rank has a
// core, or memcpy slower by a quarter with more threads.
bool disagree(const HostLimits& limits) {
  bool found = false;
  for (std::size_t i = 0; cores() > 1 && i < limits.flags.size(); i += 2)
    found |= limits.flags[i].seconds.median > limits.flags[i + 1].seconds.median;
  double most = 0;
  for (const MemcpyRate& one : limits.memcpy) {
    found |= most > 1.25 * one.bytes_per_second.median;
    most = std::max(most, one.bytes_per_second.median);
  }
  return found;
}

std::string table_of(const HostLimits& limits) {
  double load = 0;
  getloadavg(&load, 1);
  std::string text = fmt::format("Machine   {}; load average {:.1f}\n", machine_line(), load);
  for (const MemcpyRate& one : limits.memcpy) {
    text += fmt::format("memcpy    {:<23} {} read and written\n", report::counted(one.threads, "thread"),
                        shown(one.bytes_per_second, report::in_bytes_per_second));
  }
  for (const FlagTime& one : limits.flags) {
    text += fmt::format("flag      {:<10} {:<12} {} one way\n", one.group, one.waiting,
                        shown(one.seconds, in_time));
  }
  for (const BarrierTime& one : limits.barriers) {
    text += fmt::format("barrier   {:<10} {:<12} {}\n", one.group, report::counted(one.ranks, "rank"),
                        shown(one.seconds, in_time));
  }
  if (disagree(limits)) {
    text += fmt::format(
        "\n{} figures disagree: sleeping beats spinning, or more threads copy less. Other work "
        "shares the\ncores. Measure again on an idle machine.\n",
        report::toned("Warning:", report::Tone::doubtful, colours(stdout)));
  }
  return text;
}

// Adds the median under `name`, and the range.
void add_spread(nlohmann::ordered_json& json, const char* name, const Spread& spread) {
  json.update({{name, spread.median}, {"low", spread.low}, {"high", spread.high}});
}

nlohmann::ordered_json json_of(const HostLimits& limits) {
  nlohmann::ordered_json json = report_json("ferry.limits", 1);
  json["machine"] = machine_json();
  for (const MemcpyRate& one : limits.memcpy) {
    json["memcpy"].push_back({{"threads", one.threads}});
    add_spread(json["memcpy"].back(), "bytes_per_second", one.bytes_per_second);
  }
  for (const FlagTime& one : limits.flags) {
    json["flag_one_way"].push_back({{"group", one.group}, {"waiting", one.waiting}});
    add_spread(json["flag_one_way"].back(), "seconds", one.seconds);
  }
  for (const BarrierTime& one : limits.barriers) {
    json["barrier"].push_back({{"group", one.group}, {"ranks", one.ranks}});
    add_spread(json["barrier"].back(), "seconds", one.seconds);
  }
  return json;
}

void measure_limits(const std::string& backend, int ranks, const std::string& path) {
  const Output json(path);
  if (backend == "cuda") {
    const GpuLimits limits = measure_gpu_limits(ranks);
    return write_report(json, json_of(limits), table_of(limits));
  }
  const HostLimits limits = measure_host_limits(ranks);
  write_report(json, json_of(limits), table_of(limits));
}

}  // namespace

void add_limits(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("limits", "Measure what this machine can move and how fast its ranks signal");
  command->footer(kLimitsFooter);
  struct Options {
    std::string backend = "cpu";
    int ranks = 8;
    std::string json;
  };
  const auto options = std::make_shared<Options>();
  add_choice(*command, "--backend", options->backend, "cpu (default), or cuda to measure the GPUs",
             {"cpu", "cuda"});
  add_number(*command, "-n,--ranks", options->ranks, "ranks in the barrier and in the push; default 8", 2,
             1024);
  add_json(*command, options->json);
  command->callback([options] { measure_limits(options->backend, options->ranks, options->json); });
}

}  // namespace ferry::app
