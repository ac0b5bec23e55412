#include "tools/ferry/run/run_options.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "ferry/error.hpp"
#include "tools/ferry/common/arguments.hpp"

namespace ferry::app {

namespace {

void add_choice(CLI::App& command, const char* name, std::string& value, const char* about,
                const std::vector<std::string>& choices) {
  command.add_option(name, value, about)->check(CLI::IsMember(choices).description(""))->type_name("NAME");
}

void add_group_options(CLI::App& command, RunOptions& options) {
  add_choice(command, "--backend", options.backend, "cpu (default), reference (slow: the oracle) or cuda",
             {"cpu", "reference", "cuda"});
  add_number(command, "--ranks", options.ranks, "ranks on this machine, default 8", 1, 1024);
  command.add_flag("--processes", options.processes, "each rank is a process instead of a thread");
}

void add_trace_options(CLI::App& command, RunOptions& options) {
  add_text(command, "--trace", options.trace,
           "a recorded trace (folder/name or path.npy), or\nsynth:decode, synth:prefill, "
           "synth:uniform; default:\n"
           "the first recorded one under FERRY_TRACES, else\nsynth:decode",
           "NAME");
  add_number(command, "--layer", options.layer, "only this layer of the trace; default: all in turn", 0,
             std::numeric_limits<int>::max());
  add_count(command, "--steps", options.steps, "one dispatch, the experts, one combine each; default 16");
  add_count(command, "--tokens", options.tokens, "tokens of a rank in a step, default 128");
  add_count(command, "--experts", options.experts, "experts of a synthesised trace, default 256");
  add_number(command, "--top-k", options.top_k, "experts of a token in a synthesised trace, default 8", 1,
             kMaxTopK);
  add_seed(command, options.seed, "of a synthesised trace, the tokens and the experts'\nweights, default 1");
}

void add_exchange_options(CLI::App& command, RunOptions& options) {
  add_count(command, "--hidden", options.hidden, "columns of a token, default 1024");
  add_count(command, "--inner", options.inner, "inner columns of an expert, default 64");
  add_choice(command, "--layout", options.layout, "expert_major (default), expert_padded or rank_major",
             {"expert_major", "expert_padded", "rank_major"});
  command
      .add_option("--format", options.format,
                  "bf16 (default), fp16, fp32, or fp8, followed by any of\n-columns, -pow2, -packed")
      ->type_name("NAME");
  add_choice(command, "--reduction", options.reduction, "partial (default), exact or unreduced",
             {"partial", "exact", "unreduced"});
  add_count(command, "--alignment", options.alignment, "experts' rows start at multiples of it, default 1");
}

void add_output_options(CLI::App& command, RunOptions& options) {
  add_output(command, "--json", options.json, "the report as JSON; - is stdout, instead of the table");
  add_output(command, "--html", options.html, "a page that shows the run, or - likewise");
  add_output(command, "--timeline", options.timeline,
             "the timeline for Perfetto (Chrome trace format), or -");
}

// A recording may list an expert twice for a token, which takes room for more rows.
bool has_repeats(const Trace& trace) {
  const auto k = static_cast<std::size_t>(trace.top_k);
  std::vector<std::int32_t> token(k);
  for (std::size_t begin = 0; begin < trace.ids.size(); begin += k) {
    std::copy_n(trace.ids.begin() + static_cast<std::ptrdiff_t>(begin), k, token.begin());
    std::sort(token.begin(), token.end());
    const auto chosen = std::upper_bound(token.begin(), token.end(), -1);  // masked slots repeat at will
    if (std::adjacent_find(chosen, token.end()) != token.end()) return true;
  }
  return false;
}

void check_for_experts(const Config& config) {
  if (config.layout == Layout::rank_major && config.reduction != Reduction::partial) {
    throw UsageError(fmt::format(
        "--reduction {} with --layout rank_major: its rows are sums already, only partial adds them",
        to_string(config.reduction)));
  }
}

}  // namespace

void add_run_options(CLI::App& command, RunOptions& options) {
  add_group_options(command, options);
  add_trace_options(command, options);
  add_exchange_options(command, options);
  add_output_options(command, options);
}

DType token_type(const Format& format) {
  if (format.kind == FormatKind::fp32) return DType::fp32;
  if (format.kind == FormatKind::fp16) return DType::fp16;
  return DType::bf16;
}

Config config_of(const RunOptions& options, const Trace& trace) {
  Config config;
  config.experts = trace.experts;
  config.top_k = trace.top_k;
  config.hidden = options.hidden;
  config.max_tokens = options.tokens;
  config.backend = backend_of(options.backend);
  config.placement = Placement::blocks(trace.experts, options.ranks);
  config.layout = layout_of(options.layout);
  config.alignment = options.alignment;
  config.repeats = has_repeats(trace);
  config.format = format_of(options.format);
  config.combine_type = token_type(config.format);
  config.reduction = reduction_of(options.reduction);
  config.deadline = kDeadline;
  check_for_experts(config);
  size_of(config, options.ranks);  // refuses what construction would
  return config;
}

}  // namespace ferry::app
