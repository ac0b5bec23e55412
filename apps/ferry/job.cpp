#include "apps/ferry/job.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>

#include "apps/ferry/machine.hpp"
#include "apps/ferry/random.hpp"
#include "apps/ferry/traces.hpp"
#include "cpu/kernels.hpp"
#include "ferry/error.hpp"

namespace ferry::app {

namespace {

// Enough tokens that no step repeats another, but at least the usual trace.
std::int64_t tokens_to_synthesise(const RunOptions& options) {
  const SynthSpec usual;
  const std::int64_t steps = options.layer >= 0 ? options.steps : (options.steps - 1) / usual.layers + 1;
  return std::max(usual.tokens, steps * options.ranks * options.tokens);
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

// A run that cannot fit is refused before the system has to end it.
void check_memory(const RunOptions& options, const Config& config) {
  double bytes = static_cast<double>(ExpertWeights::bytes(config.experts, config.hidden, options.inner));
  for (int rank = 0; rank < options.ranks; ++rank) {
    const Sizes sizes = size_of(config, options.ranks, rank);
    bytes += static_cast<double>(sizes.dispatch_staging) + static_cast<double>(sizes.combine_staging);
  }
  const auto available = static_cast<double>(available_memory_bytes());
  if (available == 0 || bytes < available) return;
  throw SystemError(
      fmt::format("{} ranks of {} tokens, hidden {}, with {} experts of {} inner columns take {:.1f} GB "
                  "for staging and weights alone, {:.1f} GB are free",
                  options.ranks, options.tokens, config.hidden, config.experts, options.inner, bytes * 1e-9,
                  available * 1e-9),
      ENOMEM);
}

}  // namespace

Job make_job(const RunOptions& options) {
  Job job;
  job.options = options;
  std::string name = options.trace;
  if (name.empty()) {
    name = default_recorded_trace();
    job.fell_back = name.empty();
    if (job.fell_back) name = "synth:decode";
  }
  const TraceOptions how = trace_options(options);
  if (name.starts_with("synth:")) job.synth = parse_synth_spec(name, how.synth);
  job.trace = open_trace(name, how);
  check_options(options, job.trace);
  job.config = config_of(options, job.trace);
  job.type = token_type(job.config.format);
  check_memory(options, job.config);
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
