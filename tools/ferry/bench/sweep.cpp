#include "tools/ferry/bench/sweep.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "base/enumerators.hpp"
#include "ferry/error.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/common/traces.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

constexpr double kGpuDeadlineSeconds = 60.0;
constexpr int kLaunches = 20;                  // of a short call
constexpr std::int64_t kShortBytes = 2 << 20;  // received by a rank in a short call, at most

int parse_number(const std::string& text, const std::string& whole) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 1) {
    throw UsageError(fmt::format("--tokens {}: '{}' is not a positive number", whole, text));
  }
  return value;
}

double bytes_needed(const BenchPoint& point) {
  double bytes = 0;
  for (int rank = 0; rank < point.ranks; ++rank) {
    const Sizes sizes = size_of(point.config, point.ranks, rank);
    bytes += static_cast<double>(sizes.total() - sizes.results);
  }
  const double tokens = static_cast<double>(point.ranks) * point.tokens;
  const double row = static_cast<double>(point.token_bytes());
  bytes += tokens * row * (BenchInputs::kSets + 1);  // inputs and results
  bytes += tokens * row * point.config.top_k;        // received rows
  return bytes;
}

void check_memory(const BenchPoint& point) {
  require_free_memory(bytes_needed(point),
                      fmt::format("{} of {}, hidden {},", report::counted(point.ranks, "rank"),
                                  report::counted(point.tokens, "token"), point.config.hidden));
}

BenchPoint make_point(const BenchOptions& options, const Trace& trace, int ranks, int tokens,
                      const std::string& format, const std::string& layout, Reduction reduction) {
  const BackendKind backend = enumerator_named<BackendKind>("--backend", options.backend);
  const bool on_gpus = backend == BackendKind::cuda;
  const bool over_engine = backend == BackendKind::collective && !options.choice.gpu_option().empty();
  BenchPoint point;
  point.trace = &trace;
  point.ranks = ranks;
  point.processes = options.processes;
  point.hosts = options.hosts;
  point.tokens = tokens;
  point.repetitions = options.repetitions;
  point.config =
      make_config({.backend = backend,
                   .engine = enumerator_named<EngineKind>("--engine", options.choice.engine),
                   .memory = enumerator_named<MemoryKind>("--memory", options.choice.memory),
                   .ranks = ranks,
                   .tokens = tokens,
                   .hidden = options.hidden,
                   .layout = enumerator_named<Layout>("--layout", layout),
                   .format = format_of(format),
                   .reduction = reduction,
                   .hops = enumerator_named<Hops>("--hops", options.hops),
                   .deadline_seconds = on_gpus || over_engine ? kGpuDeadlineSeconds : kHostDeadlineSeconds},
                  trace);
  point.type = point.config.combine_type;
  if (options.global_scale && takes_global_scale(point.config.format))
    point.global_scale = static_cast<float>(*options.global_scale);
  const std::int64_t received = std::int64_t{tokens} * point.config.top_k * point.token_bytes();
  const bool short_calls = received <= kShortBytes && !over_engine;  // those are timed one by one
  point.launches = on_gpus || short_calls ? kLaunches : 1;
  return point;
}

std::vector<Work> works_named(const std::string& name) {
  if (name == "plan") return {Work::dispatch_plan};
  if (name == "nccl") return {Work::nccl, Work::nccl_rows};
  for (const Work work : {Work::dispatch, Work::combine, Work::pair, Work::metadata})
    if (name == to_string(work)) return {work};
  throw UsageError(fmt::format("--work {}: unknown", name));
}

// In the order of launch, then work, then form.
std::vector<TimedCall> all_calls(const BenchOptions& options) {
  std::vector<TimedCall> calls;
  const auto add = [&](Work work, bool eager, bool in_phases) {
    for (const std::string& reduction : options.reductions) {
      for (const std::string& weights : options.weights) {
        for (const int sms : options.sms)
          calls.push_back({work, enumerator_named<Reduction>("--reduction", reduction), weights == "with",
                           eager, in_phases, sms});
      }
    }
  };
  for (const std::string& launch : options.launches) {
    for (const std::string& name : options.works) {
      for (const Work work : works_named(name)) {
        for (const std::string& form : options.forms) add(work, launch == "eager", form == "phases");
      }
    }
  }
  return calls;
}

std::vector<TimedCall> calls_of_layout(const BenchOptions& options, Layout layout) {
  std::vector<TimedCall> calls;
  for (const TimedCall& requested : all_calls(options)) {
    const std::optional<TimedCall> one = normalised(requested, layout);
    if (one && std::find(calls.begin(), calls.end(), *one) == calls.end()) calls.push_back(*one);
  }
  return calls;
}

// The reduction that needs the most memory; it sizes the exchange and the result.
Reduction largest_reduction(const std::vector<TimedCall>& calls) {
  const auto any = [&](Reduction reduction) {
    return std::any_of(calls.begin(), calls.end(),
                       [&](const TimedCall& call) { return call.combines() && call.reduction == reduction; });
  };
  if (any(Reduction::unreduced)) return Reduction::unreduced;
  return any(Reduction::exact) ? Reduction::exact : Reduction::partial;
}

void add_cases(const BenchOptions& options, const std::vector<Trace>& traces, int ranks,
               std::vector<GpuCase>& cases) {
  std::set<DType> types;  // whose combine and NCCL baseline are in a case already
  bool first = true;
  for (const std::string& format : options.formats) {
    const bool new_type = types.insert(token_type(format_of(format))).second;
    for (const std::string& layout : options.layouts) {
      for (const Trace& trace : traces) {
        for (const int tokens : parse_sweep(options.tokens)) {
          std::vector<TimedCall> calls =
              calls_of_layout(options, enumerator_named<Layout>("--layout", layout));
          std::erase_if(calls, [&](const TimedCall& call) {
            if (call.work == Work::metadata) return !first;
            if (call.uses_nccl()) return !new_type || layout != options.layouts.front();
            return call.work == Work::combine && !new_type;
          });
          if (calls.empty()) continue;
          first = false;
          const BenchPoint point =
              make_point(options, trace, ranks, tokens, format, layout, largest_reduction(calls));
          cases.push_back({point, calls});
        }
      }
    }
  }
}

}  // namespace

std::vector<int> parse_sweep(const std::string& text) {
  std::vector<int> values;
  if (const std::size_t colon = text.find(':'); colon != std::string::npos) {
    const std::int64_t last = parse_number(text.substr(colon + 1), text);
    for (std::int64_t value = parse_number(text.substr(0, colon), text); value <= last; value *= 2) {
      values.push_back(static_cast<int>(value));
    }
    if (values.empty())
      throw UsageError(fmt::format("--tokens {}: the last number is below the first", text));
    return values;
  }
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    values.push_back(parse_number(text.substr(begin, end - begin), text));
    begin = end + 1;
  }
  return values;
}

std::vector<Trace> open_bench_traces(const BenchOptions& options) {
  std::vector<std::string> names = options.traces;
  if (names.empty()) {
    names = {"synth:uniform", "synth:decode"};
    warn_of_missing_traces();
    if (const std::string recorded = default_recorded_trace(); !recorded.empty()) names.push_back(recorded);
  }
  std::vector<Trace> traces(names.size());
  const Trace* recorded = nullptr;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].empty()) throw UsageError("--trace: must not be empty");
    if (names[i].starts_with("synth:")) continue;
    traces[i] = open_trace(names[i]);
    if (recorded == nullptr) recorded = &traces[i];
  }
  TraceOptions trace_options;
  trace_options.synth.seed = options.seed;
  if (recorded != nullptr) {
    trace_options.synth.experts = recorded->experts;
    trace_options.synth.top_k = recorded->top_k;
  }
  if (options.experts > 0) trace_options.synth.experts = options.experts;
  if (options.top_k > 0) trace_options.synth.top_k = options.top_k;
  const std::vector<int> tokens = parse_sweep(options.tokens);
  trace_options.synth.tokens = std::int64_t{*std::max_element(tokens.begin(), tokens.end())} *
                               *std::max_element(options.ranks.begin(), options.ranks.end());
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].starts_with("synth:")) traces[i] = open_trace(names[i], trace_options);
  }
  return traces;
}

std::vector<BenchPoint> bench_points(const BenchOptions& options, const std::vector<Trace>& traces) {
  check_engine(options.backend, options.choice);
  check_global_scale(options.global_scale, options.formats);
  check_gpus(options.backend, options.choice);
  std::vector<BenchPoint> points;
  for (const int ranks : options.ranks) {
    for (const std::string& format : options.formats) {
      for (const std::string& layout : options.layouts) {
        for (const std::string& reduction : options.reductions) {
          check_reduction(enumerator_named<Layout>("--layout", layout),
                          enumerator_named<Reduction>("--reduction", reduction));
          for (const Trace& trace : traces) {
            for (const int tokens : parse_sweep(options.tokens)) {
              points.push_back(make_point(options, trace, ranks, tokens, format, layout,
                                          enumerator_named<Reduction>("--reduction", reduction)));
              if (!on_device(points.back().config)) check_memory(points.back());
            }
          }
        }
      }
    }
  }
  return points;
}

double work_of(const BenchPoint& point) {
  constexpr double kStartBytes = 500e3, kChecks = 50;  // measured on a CPU; checks: calls that take as long
  const double received = static_cast<double>(point.ranks) * point.tokens * point.config.top_k *
                          static_cast<double>(point.token_bytes());
  const double calls = static_cast<double>(point.repetitions) * point.launches;
  return calls * (received + kStartBytes) + kChecks * received;
}

std::vector<GpuCase> gpu_cases(const BenchOptions& options, const std::vector<Trace>& traces) {
  if (options.processes)
    throw UsageError("--processes with --backend cuda: ranks of a GPU benchmark are threads");
  if ((options.hosts > 1) != (options.hops == "two"))
    throw UsageError("--hosts with --backend cuda simulates hosts for --hops two: give both or neither");
  for (const int ranks : options.ranks) {
    if (ranks % options.hosts != 0)
      throw UsageError(fmt::format("--hosts {}: must divide --ranks {}", options.hosts, ranks));
  }
  check_engine(options.backend, options.choice);
  check_global_scale(options.global_scale, options.formats);
  std::vector<GpuCase> cases;
  for (const int ranks : options.ranks) add_cases(options, traces, ranks, cases);
  if (cases.empty()) {
    throw UsageError("nothing to time: with --layout rank_major combine has only --reduction partial");
  }
  return cases;
}

const char* to_string(Work work) {
  constexpr const char* kNames[] = {"dispatch", "dispatch_plan", "combine",  "pair",
                                    "metadata", "nccl",          "nccl_rows"};
  return kNames[static_cast<int>(work)];
}

std::optional<TimedCall> normalised(TimedCall call, Layout layout) {
  const bool sums = layout == Layout::rank_major;  // rows are already sums over the rank's experts
  if (call.combines() && sums && call.reduction != Reduction::partial) return std::nullopt;
  if (!call.combines()) call.reduction = Reduction::partial;
  if (call.work == Work::combine && (sums || call.reduction == Reduction::unreduced)) call.weighted = false;
  if (call.work == Work::metadata || call.uses_nccl()) {
    call.weighted = call.in_phases = false;
    call.sm_limit = 0;
  }
  // The host must read the counts before it can issue the all-to-all-v, so that cannot be captured. With
  // known counts it can.
  if (call.uses_nccl()) call.eager = call.work == Work::nccl;
  return call;
}

}  // namespace ferry::app
