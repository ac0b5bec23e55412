// ferry trace: lists recorded routing traces, shows their statistics, balances them, and synthesises new
// ones.
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ferry/balance.hpp"
#include "ferry/error.hpp"
#include "ferry/placement.hpp"
#include "ferry/trace.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/traces.hpp"
#include "tools/report/units.hpp"
#include "trace/trace.hpp"

namespace ferry::app {

namespace {

constexpr const char* kTraceFooter = R"(Examples:
  ferry trace list
  ferry trace info synth:prefill:experts=128,seed=7
  ferry trace info deepseek_v2_lite/intent --ranks 4 --json -
  ferry trace balance synth:prefill --ranks 32 --nodes 4
  ferry trace synth synth:decode:tokens=8192 --out /tmp/decode
  ferry run --trace /tmp/decode.ids.npy
)";

// Statistics of one layer, or their median over layers.
struct LayerStatistics {
  std::string layer;
  LoadStatistics load;
  double busiest_rank = 0;   // load of the busiest rank over the mean
  double overlap = 0;        // mean number of experts that neighbouring tokens share
  double ranks_reached = 0;  // mean number of ranks that a token is sent to
};

LayerStatistics statistics_of(const Trace& trace, int layer, const Placement& placement) {
  const std::vector<std::int64_t> counts = expert_counts(trace, layer);
  return {.layer = std::to_string(layer),
          .load = load_statistics(counts),
          .busiest_rank = busiest(rank_counts(counts, placement)),
          .overlap = adjacent_overlap(trace, layer),
          .ranks_reached = distinct_ranks(trace, layer, placement)};
}

std::vector<LayerStatistics> statistics_of(const Trace& trace, int ranks) {
  const Placement placement = Placement::blocks(trace.experts, ranks);
  std::vector<LayerStatistics> layers;
  for (int layer = 0; layer < trace.layers; ++layer) layers.push_back(statistics_of(trace, layer, placement));
  return layers;
}

LoadStatistics median_of(const std::vector<LayerStatistics>& layers) {
  std::vector<LoadStatistics> loads;
  for (const LayerStatistics& statistics : layers) loads.push_back(statistics.load);
  return median(loads);
}

std::string shape_of(const Trace& trace) {
  return fmt::format("{} of {}, {}, top {}", report::counted(trace.layers, "layer"),
                     report::counted(trace.tokens, "token"), report::counted(trace.experts, "expert"),
                     trace.top_k);
}

std::string line_of(const LayerStatistics& at) {
  const LoadStatistics& l = at.load;
  return fmt::format("{:<7}{:>7.2f}{:>7.2f}{:>7.2f}{:>7.2f}{:>7.2f}{:>7.2f}{:>9.2f}{:>7.2f}{:>6}", at.layer,
                     l.max, l.p99, l.p90, l.p50, l.p10, l.min, l.sigma_ln, l.gini, l.idle);
}

std::string info_table(const Trace& trace, int ranks, const std::vector<LayerStatistics>& layers) {
  std::string text =
      fmt::format("Trace    {}\n         {}\n         {}\n\n", trace.name, trace.source, shape_of(trace));
  text += "Load of the experts, relative to their mean\n";
  text += fmt::format("{:<7}{:>7}{:>7}{:>7}{:>7}{:>7}{:>7}{:>9}{:>7}{:>6}\n", "layer", "max", "p99", "p90",
                      "p50", "p10", "min", "sigma ln", "gini", "idle");
  for (const LayerStatistics& statistics : layers) text += line_of(statistics) + "\n";
  text += line_of({.layer = "median", .load = median_of(layers)}) + "\n\n";
  text +=
      fmt::format("With {}, each holding a block of neighbouring experts\n", report::counted(ranks, "rank"));
  text += fmt::format("{:<7}{:>14}{:>18}{:>30}\n", "layer", "busiest rank", "ranks per token",
                      "experts shared by neighbours");
  for (const LayerStatistics& at : layers) {
    text += fmt::format("{:<7}{:>12.2f} x{:>18.2f}{:>30.2f}\n", at.layer, at.busiest_rank, at.ranks_reached,
                        at.overlap);
  }
  return text;
}

nlohmann::ordered_json json_of(const LoadStatistics& load) {
  return {{"routes", load.routes}, {"max", load.max},  {"p99", load.p99}, {"p90", load.p90},
          {"p50", load.p50},       {"p10", load.p10},  {"min", load.min}, {"sigma_ln", load.sigma_ln},
          {"gini", load.gini},     {"idle", load.idle}};
}

// What a report of `schema` on a trace begins with.
nlohmann::ordered_json trace_json(const char* schema, const Trace& trace) {
  nlohmann::ordered_json json = report_json(schema, 1);
  json.update({{"name", trace.name}, {"source", trace.source}});
  return json;
}

nlohmann::ordered_json json_of(const Trace& trace, int ranks, const std::vector<LayerStatistics>& layers) {
  nlohmann::ordered_json json = trace_json("ferry.trace", trace);
  json.update({{"layers", trace.layers},
               {"tokens", trace.tokens},
               {"experts", trace.experts},
               {"top_k", trace.top_k},
               {"ranks", ranks}});
  for (const LayerStatistics& at : layers) {
    json["per_layer"].push_back({{"load", json_of(at.load)},
                                 {"busiest_rank", at.busiest_rank},
                                 {"ranks_reached", at.ranks_reached},
                                 {"adjacent_overlap", at.overlap}});
  }
  json["median_load"] = json_of(median_of(layers));
  return json;
}

void info(const std::string& name, int ranks, const std::string& path) {
  const Output json(path);
  const Trace trace = open_trace(name);
  const std::vector<LayerStatistics> layers = statistics_of(trace, ranks);
  write_report(json, json_of(trace, ranks, layers), info_table(trace, ranks, layers));
}

// A layer before and after balance(): with blocks of neighbouring experts, and with its placement.
struct BalancedLayer {
  Placement placement;
  double before = 0, after = 0;            // load of the busiest rank over the mean
  double reached_before = 0, reached = 0;  // mean number of ranks that a token is sent to
};

std::vector<BalancedLayer> balance_layers(const Trace& trace, const BalanceOptions& options) {
  std::vector<double> loads;
  for (int layer = 0; layer < trace.layers; ++layer) {
    const std::vector<std::int64_t> counts = expert_counts(trace, layer);
    loads.insert(loads.end(), counts.begin(), counts.end());
  }
  const Placement blocks = Placement::blocks(trace.experts, options.ranks);
  std::vector<BalancedLayer> layers;
  for (Placement& placement : balance(loads, trace.layers, trace.experts, options)) {
    const int layer = static_cast<int>(layers.size());
    BalancedLayer at{.placement = std::move(placement)};
    at.before = busiest(rank_counts(trace, layer, blocks));
    at.after = busiest(rank_counts(trace, layer, at.placement));
    at.reached_before = distinct_ranks(trace, layer, blocks);
    at.reached = distinct_ranks(trace, layer, at.placement);
    layers.push_back(std::move(at));
  }
  return layers;
}

std::string balance_table(const Trace& trace, const BalanceOptions& options,
                          const std::vector<BalancedLayer>& layers) {
  std::string text =
      fmt::format("Trace    {}\n         {}\n         {}\n\n", trace.name, trace.source, shape_of(trace));
  text += fmt::format("With {} of {} on {}: blocks of neighbouring experts, and balanced\n",
                      report::counted(options.ranks, "rank"), report::counted(options.slots, "slot"),
                      report::counted(options.nodes, "node"));
  text += fmt::format("{:<7}{:>26}{:>26}{:>17}\n", "layer", "busiest rank over mean", "ranks per token",
                      "further replicas");
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const BalancedLayer& at = layers[layer];
    text += fmt::format("{:<7}{:>14.3f} -> {:>8.3f}{:>14.2f} -> {:>8.2f}{:>17}\n", layer, at.before, at.after,
                        at.reached_before, at.reached, at.placement.total_replicas() - trace.experts);
  }
  return text;
}

nlohmann::ordered_json balance_json(const Trace& trace, const BalanceOptions& options,
                                    const std::vector<BalancedLayer>& layers) {
  nlohmann::ordered_json json = trace_json("ferry.balance", trace);
  json.update({{"experts", trace.experts},
               {"ranks", options.ranks},
               {"slots", options.slots},
               {"nodes", options.nodes},
               {"groups", options.groups}});
  for (const BalancedLayer& at : layers) {
    std::vector<std::vector<int>> experts_of_rank;
    for (int rank = 0; rank < options.ranks; ++rank) experts_of_rank.push_back(at.placement.experts_of(rank));
    json["per_layer"].push_back({{"busiest_rank_before", at.before},
                                 {"busiest_rank", at.after},
                                 {"ranks_reached_before", at.reached_before},
                                 {"ranks_reached", at.reached},
                                 {"experts_of_rank", experts_of_rank}});
  }
  return json;
}

void show_balance(const std::string& name, BalanceOptions options, const std::string& path) {
  const Output json(path);
  const Trace trace = open_trace(name);
  if (options.slots == 0) options.slots = (trace.experts * 9 + options.ranks * 8 - 1) / (options.ranks * 8);
  const std::vector<BalancedLayer> layers = balance_layers(trace, options);
  write_report(json, balance_json(trace, options, layers), balance_table(trace, options, layers));
}

// Refuses files that cannot be written, or that exist.
void check_files(const std::string& prefix, bool force) {
  for (const char* ending : {".ids.npy", ".weights.npy", ".seqlens.npy"}) {
    if (Output(prefix + ending).replaces() && !force)
      throw UsageError(fmt::format("'{}{}' exists; use --force to replace it", prefix, ending));
  }
}

void synth(const std::string& text, const std::string& prefix, bool force) {
  const SynthSpec spec = parse_synth_spec(text);
  check_files(prefix, force);
  const Trace trace = synthesise(spec);
  save_trace(trace, prefix);
  fmt::print("{}: {}\n", trace::to_string(spec), shape_of(trace));
  fmt::print("written to {0}.ids.npy, {0}.weights.npy and {0}.seqlens.npy\n", prefix);
}

void list() {
  fmt::print(
      "Synthesised  synth:decode   synth:prefill   synth:uniform, each also with -grouped, and with\n"
      "             :experts=E,top_k=K,tokens=N,layers=N,seed=N,block_sigma=S\n");
  const std::vector<RecordedTrace> traces = recorded_traces();
  if (traces.empty()) {
    fmt::print("Recorded     none: {}\n", why_no_traces());
    fmt::print("             {}\n", how_to_get_traces());
    return;
  }
  const char* heading = "Recorded";
  for (const RecordedTrace& trace : traces) {
    fmt::print("{:<13}{}{}\n", heading, trace.name, trace.weights ? "" : "  (without weights)");
    heading = "";
  }
}

void add_info(CLI::App& command) {
  CLI::App* at = command.add_subcommand("info", "Show the statistics of a trace");
  struct Options {
    std::string name, json;
    int ranks = 8;
  };
  const auto options = std::make_shared<Options>();
  at->add_option("name", options->name, "the trace: folder/name, path.npy or synth:...")
      ->required()
      ->type_name("NAME");
  add_number(*at, "-n,--ranks", options->ranks, "number of ranks that hold the experts; default 8", 1,
             1 << 20);
  add_json(*at, options->json);
  at->footer(kTraceFooter);
  at->callback([options] { info(options->name, options->ranks, options->json); });
}

void add_balance(CLI::App& command) {
  CLI::App* at = command.add_subcommand("balance", "Place experts so that all ranks have the same load");
  struct Options {
    std::string name, json;
    BalanceOptions balance{.ranks = 8, .slots = 0};
  };
  const auto options = std::make_shared<Options>();
  constexpr int kMost = 1 << 20;
  at->add_option("name", options->name, "the trace: folder/name, path.npy or synth:...")
      ->required()
      ->type_name("NAME");
  add_number(*at, "-n,--ranks", options->balance.ranks, "number of ranks that hold the experts; default 8", 1,
             kMost);
  add_number(*at, "--slots", options->balance.slots,
             "most experts on a rank, replicas included; default:\nroom for an eighth more than there are", 1,
             kMost);
  add_number(*at, "--nodes", options->balance.nodes,
             "nodes of the ranks; the replicas of an expert are on\none node; default 1", 1, kMost);
  add_number(*at, "--groups", options->balance.groups,
             "groups of neighbouring experts that stay on one node;\ndefault: every expert is a group", 1,
             kMost);
  add_output(*at, "--json", options->json,
             "write report and placements as JSON; - is stdout and\nreplaces the table");
  at->footer(kTraceFooter);
  at->callback([options] { show_balance(options->name, options->balance, options->json); });
}

void add_synth(CLI::App& command) {
  CLI::App* at = command.add_subcommand("synth", "Synthesise a trace and write it as .npy files");
  struct Options {
    std::string spec, prefix;
    bool force = false;
  };
  const auto options = std::make_shared<Options>();
  at->add_option("spec", options->spec,
                 "synth:decode, synth:prefill or synth:uniform, optionally\nfollowed by :key=value,...")
      ->required()
      ->type_name("NAME");
  add_text(*at, "--out", options->prefix,
           "prefix of the files: PREFIX.ids.npy,\nPREFIX.weights.npy and PREFIX.seqlens.npy", "PREFIX")
      ->required();
  at->add_flag("--force", options->force, "replace existing files");
  at->footer(kTraceFooter);
  at->callback([options] { synth(options->spec, options->prefix, options->force); });
}

}  // namespace

void add_trace(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "trace", "List, balance and synthesise routing traces, and show their statistics (info)");
  command->footer(kTraceFooter);
  command->require_subcommand(1);
  add_info(*command);
  add_balance(*command);
  add_synth(*command);
  command->add_subcommand("list", "List the traces that can be run")->callback(list);
}

}  // namespace ferry::app
