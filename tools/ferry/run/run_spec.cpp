#include "tools/ferry/run/run_spec.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>

#include "backends/cpu/kernels.hpp"
#include "ferry/error.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/common/progress.hpp"
#include "tools/ferry/common/random.hpp"
#include "tools/ferry/common/recorded_traces.hpp"
#include "tools/report/units.hpp"
#include "trace/synth.hpp"

namespace ferry::app {

namespace {

// Enough tokens that no step repeats another, but at least the usual trace, and no more than a trace can
// have.
std::int64_t tokens_to_synthesise(const RunOptions& options) {
  const SynthSpec usual;
  const int top_k = options.top_k > 0 ? options.top_k : usual.top_k;
  const std::int64_t steps = options.layer >= 0 ? options.steps : (options.steps - 1) / usual.layers + 1;
  const double wanted = static_cast<double>(steps) * options.ranks * options.tokens;
  const std::int64_t most = trace::kMaxRoutes / usual.layers / top_k;
  return std::max(usual.tokens,
                  wanted < static_cast<double>(most) ? static_cast<std::int64_t>(wanted) : most);
}

TraceOptions trace_options(const RunOptions& options) {
  TraceOptions how;
  how.experts = options.experts;
  how.synth.seed = options.seed;
  how.synth.tokens = tokens_to_synthesise(options);
  if (options.experts > 0) how.synth.experts = options.experts;
  if (options.top_k > 0) how.synth.top_k = options.top_k;
  return how;
}

void check_options(const RunOptions& options, const Trace& trace) {
  if (options.layer >= trace.layers) {
    throw UsageError(
        fmt::format("--layer {}: trace {} has layers 0 to {}", options.layer, trace.name, trace.layers - 1));
  }
  if (options.experts > 0 && options.experts != trace.experts) {
    throw UsageError(
        fmt::format("--experts {}: trace {} has {}", options.experts, trace.name, trace.experts));
  }
  if (options.top_k > 0 && options.top_k != trace.top_k) {
    throw UsageError(fmt::format("--top-k {}: trace {} has {}", options.top_k, trace.name, trace.top_k));
  }
}

// What a rank keeps to check with: ids, weights and places of all ranks, and their counts.
double oracle_bytes(const RunOptions& options, const Config& config) {
  constexpr double kRoute = 64;  // an id, a weight, a place and a row, about
  const double ranks = options.ranks;
  return kRoute * ranks * options.tokens * config.top_k + 4 * ranks * (ranks + config.experts);
}

// A run that cannot fit is refused before the system has to end it.
void check_memory(const RunOptions& options, const Config& config) {
  double bytes = static_cast<double>(ExpertWeights::bytes(config.experts, config.hidden, options.inner));
  bytes += options.ranks * oracle_bytes(options, config);
  const bool on_host = config.backend != BackendKind::cuda;  // GPUs refuse what they cannot hold
  for (int rank = 0; on_host && rank < options.ranks; ++rank) {
    const Sizes sizes = size_of(config, options.ranks, rank);
    bytes += static_cast<double>(sizes.total() - sizes.results);
  }
  // Of the arrivals' memory only the rows that come are used; the experts' outputs take as much again. Those
  // of GPUs are copied here to be looked at.
  const double row = config.hidden * static_cast<double>(bytes_of(config.combine_type));
  bytes += 2.0 * options.ranks * options.tokens * config.top_k * row;
  const auto available = static_cast<double>(available_memory_bytes());
  if (available == 0 || bytes < available) return;
  throw SystemError(
      fmt::format("{} of {}, hidden {}, with {} of {} would take about {:.1f} GB, {:.1f} GB are free",
                  report::counted(options.ranks, "rank"), report::counted(options.tokens, "token"),
                  config.hidden, report::counted(config.experts, "expert"),
                  report::counted(options.inner, "inner column"), bytes * 1e-9, available * 1e-9),
      ENOMEM);
}

// Everything about a synthesised trace but its routes: drawing those may take long.
Trace outline(const std::string& name, const SynthSpec& spec) {
  Trace trace;
  trace.name = name;
  trace.layers = spec.layers;
  trace.tokens = spec.tokens;
  trace.top_k = spec.top_k;
  trace.experts = spec.experts;
  return trace;
}

Trace draw(const SynthSpec& spec) {
  constexpr std::int64_t kMany = 1 << 20;  // routes, about a second
  const Progress progress("drawing the trace");
  if (spec.tokens * spec.layers * spec.top_k > kMany) progress.show();
  return synthesise(spec);
}

Config checked_config(const RunOptions& options, const Trace& trace) {
  check_options(options, trace);
  Config config = config_of(options, trace);
  check_memory(options, config);
  return config;
}

}  // namespace

Job make_job(const RunOptions& options) {
  Job job;
  job.options = options;
  std::string name = options.trace;
  if (name.empty()) {
    warn_of_missing_traces();
    name = default_recorded_trace();
    job.fell_back = name.empty();
    if (job.fell_back) name = "synth:decode";
  }
  const TraceOptions how = trace_options(options);
  if (name.starts_with("synth:")) {
    job.synth = parse_synth_spec(name, how.synth);
    job.config = checked_config(options, outline(name, *job.synth));
    job.trace = draw(*job.synth);
  } else {
    job.trace = open_trace(name, how);
    job.config = checked_config(options, job.trace);
  }
  job.type = token_type(job.config.format);
  job.weights = ExpertWeights(job.config.experts, job.config.hidden, options.inner, options.seed);
  return job;
}

void make_token(const Job& job, int step, int rank, std::int64_t token, std::byte* values) {
  const std::uint64_t key = key_of(job.options.seed, step, rank, token);
  std::vector<float> row(static_cast<std::size_t>(job.config.hidden));
  for (std::size_t c = 0; c < row.size(); ++c) row[c] = value_at(key, c);
  cpu::kernels().convert_row(values, job.type, row.data(), DType::fp32, job.config.hidden,
                             cpu::Store::cached);
}

std::vector<std::byte> make_tokens(const Job& job, int step, int rank) {
  std::vector<std::byte> tokens(static_cast<std::size_t>(job.tokens() * job.row_bytes()));
  for (std::int64_t token = 0; token < job.tokens(); ++token) {
    make_token(job, step, rank, token, tokens.data() + token * job.row_bytes());
  }
  return tokens;
}

Routes make_routes(const Job& job, int step, int rank) {
  const bool one_layer = job.options.layer >= 0;
  Share mine = share(job.trace, {.layer = one_layer ? job.options.layer : step % job.trace.layers,
                                 .rank = rank,
                                 .ranks = job.options.ranks,
                                 .tokens_per_rank = job.tokens(),
                                 .step = one_layer ? step : step / job.trace.layers});
  return {std::move(mine.ids), std::move(mine.weights)};
}

}  // namespace ferry::app
