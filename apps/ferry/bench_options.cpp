#include "apps/ferry/bench_options.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <limits>

#include "apps/ferry/arguments.hpp"
#include "apps/ferry/bench_inputs.hpp"
#include "apps/ferry/machine.hpp"
#include "apps/ferry/run_options.hpp"
#include "apps/ferry/traces.hpp"
#include "ferry/error.hpp"
#include "report/units.hpp"

namespace ferry::app {

namespace {

constexpr double kDeadline = 300.0;       // checks come between calls, and cores may be few
constexpr int kLaunches = 20;             // of a short call
constexpr std::int64_t kShort = 2 << 20;  // bytes that arrive at a rank

int parse_number(const std::string& text, const std::string& whole) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 1) {
    throw UsageError(fmt::format("--tokens {}: '{}' is no positive number", whole, text));
  }
  return value;
}

double bytes_needed(const BenchPoint& point) {
  double bytes = 0;
  for (int rank = 0; rank < point.ranks; ++rank) {
    const Sizes sizes = size_of(point.config, point.ranks, rank);
    bytes += static_cast<double>(sizes.total() - sizes.arrivals);
  }
  const double tokens = static_cast<double>(point.ranks) * point.tokens;
  const double row = static_cast<double>(point.token_bytes());
  bytes += tokens * row * (BenchInputs::kSets + 1);  // inputs and results
  bytes += tokens * row * point.config.top_k;        // arrived rows
  return bytes;
}

void check_memory(const BenchPoint& point) {
  if (point.config.backend == BackendKind::cuda) return;  // the device says itself what does not fit
  const double bytes = bytes_needed(point);
  const auto available = static_cast<double>(available_memory_bytes());
  if (available == 0 || bytes < available) return;
  throw SystemError(fmt::format("{} of {}, hidden {}, would take {:.1f} GB, {:.1f} GB are free",
                                report::counted(point.ranks, "rank"), report::counted(point.tokens, "token"),
                                point.config.hidden, bytes * 1e-9, available * 1e-9),
                    ENOMEM);
}

BenchPoint make_point(const BenchOptions& options, const Trace& trace, int ranks, int tokens,
                      const std::string& format, const std::string& layout, const std::string& reduction,
                      int sm_limit) {
  BenchPoint point;
  point.trace = &trace;
  point.ranks = ranks;
  point.processes = options.processes;
  point.tokens = tokens;
  point.repetitions = options.repetitions;
  point.sm_limit = sm_limit;
  Config& config = point.config;
  config.backend = backend_of(options.backend);
  config.experts = trace.experts;
  config.top_k = trace.top_k;
  config.hidden = options.hidden;
  config.max_tokens = tokens;
  config.placement = Placement::blocks(trace.experts, ranks);
  config.layout = layout_of(layout);
  config.repeats = true;  // recordings may list an expert twice
  config.format = format_of(format);
  config.wire = point.type = token_type(config.format);
  config.reduction = reduction_of(reduction);
  config.deadline = kDeadline;
  if (config.layout == Layout::rank_major && config.reduction != Reduction::partial) {
    throw UsageError(fmt::format(
        "--reduction {} with --layout rank_major: its rows are sums already, only partial adds them",
        reduction));
  }
  size_of(config, ranks);  // refuses what construction would
  const std::int64_t arriving = std::int64_t{tokens} * config.top_k * point.token_bytes();
  point.launches = config.backend == BackendKind::cuda || arriving <= kShort ? kLaunches : 1;
  check_memory(point);
  return point;
}

}  // namespace

void add_bench_options(CLI::App& command, BenchOptions& options) {
  const std::vector<std::string> layouts{"expert_major", "expert_padded", "rank_major"};
  const std::vector<std::string> reductions{"partial", "exact", "unreduced"};
  const auto add_list = [&](const char* name, auto& values, const char* about) {
    return command.add_option(name, values, about)->delimiter(',')->type_name("LIST");
  };
  command
      .add_option("--trace", options.traces,
                  "a recorded trace (folder/name or path.npy), or\nsynth:decode, synth:prefill, "
                  "synth:uniform; may be repeated;\n"
                  "default: synth:uniform, synth:decode and the first\nrecorded one under FERRY_TRACES")
      ->type_name("NAME");
  add_text(command, "--tokens", options.tokens,
           "of a rank in a call: 1:8192 doubles, 1,5,64 is a list;\ndefault 1:2048", "LIST");
  add_list("--ranks", options.ranks, "ranks on this machine, default 4")
      ->check(CLI::Range(1, 1024).description(""));
  command
      .add_option("--backend", options.backend,
                  "cpu (default) or cuda: ranks are threads that take the\nGPUs in turn, and calls are timed "
                  "in graphs")
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""))
      ->type_name("NAME");
  add_list("--sms", options.sms, "cuda: most SMs of a call, default 0: no limit")
      ->check(CLI::Range(0, 1024).description(""));
  command.add_flag("--processes", options.processes, "each rank is a process instead of a thread");
  add_list("--format", options.formats,
           "of bf16 (default), fp16, fp32, and fp8, followed by\nany of -columns, -pow2, -packed");
  add_list("--layout", options.layouts, "of expert_major (default), expert_padded, rank_major")
      ->check(CLI::IsMember(layouts).description(""));
  add_list("--reduction", options.reductions, "of partial (default), exact, unreduced")
      ->check(CLI::IsMember(reductions).description(""));
  add_count(command, "--hidden", options.hidden, "columns of a token, default 7168");
  add_count(command, "--experts", options.experts,
            "of synthesised traces; default: as the first recorded\none, or else 256");
  add_number(command, "--top-k", options.top_k,
             "of synthesised traces; default: as the first recorded\none, or else 8", 1, kMaxTopK);
  add_count(command, "--repetitions", options.repetitions, "of every point, default 50");
  add_seed(command, options.seed, "of synthesised traces, default 1");
  add_output(command, "--json", options.json, "the report as JSON; - is stdout, instead of the table");
}

std::vector<int> parse_sweep(const std::string& text) {
  std::vector<int> values;
  if (const std::size_t colon = text.find(':'); colon != std::string::npos) {
    const std::int64_t last = parse_number(text.substr(colon + 1), text);
    for (std::int64_t value = parse_number(text.substr(0, colon), text); value <= last; value *= 2) {
      values.push_back(static_cast<int>(value));
    }
    if (values.empty()) throw UsageError(fmt::format("--tokens {}: the last is below the first", text));
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
  TraceOptions how;
  how.synth.seed = options.seed;
  if (recorded != nullptr) {
    how.synth.experts = recorded->experts;
    how.synth.top_k = recorded->top_k;
  }
  if (options.experts > 0) how.synth.experts = options.experts;
  if (options.top_k > 0) how.synth.top_k = options.top_k;
  const std::vector<int> tokens = parse_sweep(options.tokens);
  how.synth.tokens = std::int64_t{*std::max_element(tokens.begin(), tokens.end())} *
                     *std::max_element(options.ranks.begin(), options.ranks.end());
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].starts_with("synth:")) traces[i] = open_trace(names[i], how);
  }
  return traces;
}

std::vector<BenchPoint> bench_points(const BenchOptions& options, const std::vector<Trace>& traces) {
  if (options.backend == "cuda" && options.processes) {
    throw UsageError("--processes with --backend cuda: its ranks are threads");
  }
  std::vector<BenchPoint> points;
  for (const int ranks : options.ranks) {
    for (const std::string& format : options.formats) {
      for (const std::string& layout : options.layouts) {
        for (const std::string& reduction : options.reductions) {
          for (const int tokens : parse_sweep(options.tokens)) {
            for (const Trace& trace : traces) {
              for (const int sms : options.sms)
                points.push_back(make_point(options, trace, ranks, tokens, format, layout, reduction, sms));
            }
          }
        }
      }
    }
  }
  return points;
}

}  // namespace ferry::app
