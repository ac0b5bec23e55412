#include "tools/ferry/run/run_spec.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "backends/cpu/kernels/kernels.hpp"
#include "base/enumerators.hpp"
#include "ferry/error.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/common/random.hpp"
#include "tools/ferry/common/traces.hpp"
#include "tools/report/units.hpp"
#include "trace/trace.hpp"

namespace ferry::app {

namespace {

// Enough tokens that no step repeats another's, at least those of the default trace, and at most as many as a
// trace can have.
std::int64_t tokens_to_synthesise(const RunOptions& options) {
  const SynthSpec defaults;
  const int top_k = options.top_k > 0 ? options.top_k : defaults.top_k;
  const std::int64_t steps = options.layer >= 0 ? options.steps : (options.steps - 1) / defaults.layers + 1;
  const double wanted = static_cast<double>(steps) * options.ranks * options.tokens;
  const std::int64_t most = trace::kMaxRoutes / defaults.layers / top_k;
  return std::max(defaults.tokens,
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

void check_shared_experts(const RunOptions& options) {
  if (options.shared_experts == 0) return;
  const std::string given = fmt::format("--shared-experts {}", options.shared_experts);
  if (options.reduction == "unreduced")
    throw UsageError(
        given + " with --reduction unreduced: the results of shared experts are added: use partial or exact");
}

void check_input(const RunOptions& options) {
  if (options.input == "own") return;
  const std::string given = "--input " + options.input;
  if (options.reduction != "partial" || options.reduction_level == "node") {
    throw UsageError(fmt::format("{} with --reduction {} --reduction-level {}: use partial, by rank", given,
                                 options.reduction, options.reduction_level));
  }
}

void check_options(const RunOptions& options, const Trace& trace) {
  check_engine(options.backend, options.choice);
  check_shared_experts(options);
  check_input(options);
  check_global_scale(options.global_scale, {options.format});
  if (options.global_scale && options.runs_program())
    throw UsageError(
        "--global-scale: programs dispatch with g = 1; leave it out with --program and --overlap");
  if (options.layer >= trace.layers) {
    throw UsageError(
        fmt::format("--layer {}: trace {} has layers 0 to {}", options.layer, trace.name, trace.layers - 1));
  }
  if (options.experts > 0 && options.experts != trace.experts) {
    throw UsageError(fmt::format("--experts {}: trace {} has {}", options.experts, trace.name,
                                 report::counted(trace.experts, "expert")));
  }
  if (options.top_k > 0 && options.top_k != trace.top_k) {
    throw UsageError(fmt::format("--top-k {}: trace {} has top {}", options.top_k, trace.name, trace.top_k));
  }
}

// Memory of one rank's DispatchCheck: ids, weights and row positions of all ranks, and their counts.
double oracle_bytes(const RunOptions& options, const Config& config) {
  constexpr double kRoute = 64;  // roughly: an id, a weight, a position and a row
  const double ranks = options.ranks;
  return kRoute * ranks * options.tokens * config.top_k + 4 * ranks * (ranks + config.experts);
}

// Refuses a run that does not fit into memory, before the system kills it.
void check_memory(const RunOptions& options, const Config& config) {
  // A rank of mpirun checks its own memory: it does not know yet which ranks are on its host.
  const int ranks = options.on_mpi() ? 1 : options.ranks;
  double bytes = static_cast<double>(
      ExpertWeights::bytes(config.experts + config.shared_experts, config.hidden, options.inner));
  bytes += ranks * oracle_bytes(options, config);
  const bool on_host = !on_device(config);  // a failed GPU allocation is an error by itself
  for (int rank = 0; on_host && rank < ranks; ++rank) {
    const Sizes sizes = size_of(config, options.ranks, rank);
    bytes += static_cast<double>(sizes.total() - sizes.results);
  }
  // Only the received rows touch pages of the receive buffers. The experts' outputs take as much again. Rows
  // on a GPU are copied to host memory for the checks.
  const double row = config.hidden * static_cast<double>(bytes_of(config.combine_type));
  bytes += 2.0 * ranks * options.tokens * (config.top_k + config.shared_experts) * row;
  require_free_memory(
      bytes,
      fmt::format("{} of {}, hidden {}, with {} of {}", report::counted(options.ranks, "rank"),
                  report::counted(options.tokens, "token"), config.hidden,
                  report::counted(config.experts, "expert"), report::counted(options.inner, "inner column")));
}

// A synthesised trace without its routes, so that options are checked before the routes are drawn, which may
// take seconds.
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
  constexpr std::int64_t kMany = 1 << 20;  // routes that take about a second
  const Progress progress("drawing the trace");
  if (spec.tokens * spec.layers * spec.top_k > kMany) progress.show();
  return synthesise(spec);
}

Config checked_config(const RunOptions& options, const Trace& trace) {
  check_options(options, trace);
  check_gpus(options.backend, options.choice);
  const Layout layout = enumerator_named<Layout>("--layout", options.layout);
  const Reduction reduction = enumerator_named<Reduction>("--reduction", options.reduction);
  check_reduction(layout, reduction);
  const Config config = make_config(
      {.backend = enumerator_named<BackendKind>("--backend", options.backend),
       .engine = enumerator_named<EngineKind>("--engine", options.choice.engine),
       .memory = enumerator_named<MemoryKind>("--memory", options.choice.memory),
       .ranks = options.ranks,
       .tokens = options.tokens,
       .hidden = options.hidden,
       .layout = layout,
       .format = format_of(options.format),
       .reduction = reduction,
       .reduction_level = enumerator_named<ReductionLevel>("--reduction-level", options.reduction_level),
       .hops = enumerator_named<Hops>("--hops", options.hops),
       .alignment = options.alignment,
       .shared_experts = options.shared_experts,
       .input = options.input == "replicated" ? Input::replicated : Input::own,
       .transfer = options.input == "gathered" ? Transfer::gather : Transfer::routed,
       .deadline_seconds = static_cast<double>(options.deadline)},
      trace);
  check_memory(options, config);
  return config;
}

}  // namespace

RunSpec make_run_spec(const RunOptions& options) {
  RunSpec spec;
  spec.options = options;
  std::string name = options.trace;
  if (name.empty()) {
    warn_of_missing_traces();
    name = default_recorded_trace();
    if (name.empty()) name = "synth:decode";
  }
  const TraceOptions how = trace_options(options);
  if (name.starts_with("synth:")) {
    spec.synth = parse_synth_spec(name, how.synth);
    spec.config = checked_config(options, outline(name, *spec.synth));
    spec.trace = draw(*spec.synth);
  } else {
    spec.trace = open_trace(name, how);
    spec.config = checked_config(options, spec.trace);
  }
  spec.type = token_type(spec.config.format);
  spec.weights = ExpertWeights(spec.all_experts(), spec.config.hidden, options.inner, options.seed);
  return spec;
}

int token_rank(const RunSpec& spec, int rank) {
  return spec.config.input == Input::replicated ? 0 : rank;
}

std::vector<int> experts_on(const RunSpec& spec, int rank) {
  std::vector<int> experts;
  for (int shared = spec.config.experts; shared < spec.all_experts(); ++shared) experts.push_back(shared);
  const std::vector<int>& routed = spec.config.placement.experts_of(rank);
  experts.insert(experts.end(), routed.begin(), routed.end());
  return experts;
}

void make_token(const RunSpec& spec, int step, int rank, std::int64_t token, std::byte* values) {
  const std::uint64_t key = key_of(spec.options.seed, step, token_rank(spec, rank), token);
  std::vector<float> row(static_cast<std::size_t>(spec.config.hidden));
  for (std::size_t c = 0; c < row.size(); ++c) row[c] = value_at(key, c);
  cpu::kernels().convert_row(values, spec.type, row.data(), DType::fp32, spec.config.hidden,
                             cpu::Store::cached);
}

std::vector<std::byte> make_tokens(const RunSpec& spec, int step, int rank) {
  std::vector<std::byte> tokens(static_cast<std::size_t>(spec.tokens() * spec.row_bytes()));
  for (std::int64_t token = 0; token < spec.tokens(); ++token) {
    make_token(spec, step, rank, token, tokens.data() + token * spec.row_bytes());
  }
  return tokens;
}

Routes make_routes(const RunSpec& spec, int step, int rank) {
  const bool one_layer = spec.options.layer >= 0;
  TracePartition mine =
      partition(spec.trace, {.layer = one_layer ? spec.options.layer : step % spec.trace.layers,
                             .rank = token_rank(spec, rank),
                             .ranks = spec.options.ranks,
                             .tokens_per_rank = spec.tokens(),
                             .step = one_layer ? step : step / spec.trace.layers});
  return {std::move(mine.ids), std::move(mine.weights)};
}

Routes combined_routes(const RunSpec& spec, int rank, Routes routes) {
  for (std::int32_t& id : routes.ids) {
    const bool elsewhere = id >= 0 && spec.config.placement.location(id).rank != rank;
    if (elsewhere && spec.config.input == Input::replicated) id = -1;
  }
  return routes;
}

}  // namespace ferry::app
