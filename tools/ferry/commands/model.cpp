// ferry model: times of dispatch and combine from measured constants, on one node and on many.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "base/enumerators.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"
#include "tools/ferry/bench/sweep.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/model/report.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

constexpr const char* kModelFooter =
    R"(Times of the GPU backend, in CUDA graphs unless --launch says otherwise. They are computed, not measured: a start,
and link, network, SMs and memory, which overlap where tokens are many and follow one another where they are few.
docs/model.md has the formula, its errors and its assumptions. Times between nodes are a forecast: none has been measured
between hosts.

link      bytes of the busiest rank within its node, at the measured push rate
network   bytes of the busiest rank between nodes, at the network's rate
SMs       rows that a rank stores, reads, adds and quantises, by its SMs
memory    bytes that a GPU reads and writes in its memory

Examples:
  ferry model --ranks 4 --tokens 1:8192 --format fp8
  ferry model --ranks 64 --nodes 8 --network ib400 --tokens 128,4096
  ferry model --scale                                    EP16 to EP1024, one hop and two hops
  ferry model --memory --ranks 64 --tokens 128,4096      bytes of a rank, and what lowers them
  ferry limits --backend cuda --ranks 4 --json limits.json
  ferry bench --backend cuda --ranks 4 --tokens 1,128,512,4096 --trace synth:uniform --experts 256 --top-k 8 \
      --format bf16,fp8 --layout expert_major,rank_major --sms 0,16 --json bench.json
  ferry model --calibrate limits.json bench.json -o constants.json
  ferry model --check other.json --constants constants.json
)";

// Experts of an exchange. Every rank has one or more of them, so there are at most as many ranks, whose loads
// take about 220 MB.
constexpr int kMostExperts = 1 << 20;

struct ModelOptions {
  int ranks = 8, nodes = 1, node_ranks = 8;
  std::string tokens = "1,128,4096", trace = "synth:uniform";
  std::string format = "bf16", layout = "expert_major", reduction = "partial";
  std::vector<std::string> works{"dispatch", "combine"};
  std::string launch = "graph", form = "fused", hops = "both";
  int hidden = 7168, experts = 256, top_k = 8, sms = 0;
  std::string network;
  double nic_rate = 0, nic_latency = 0, nic_messages = 0, link_rate = 0;
  bool scale = false, memory = false;
  std::vector<std::string> calibrate, check;
  std::string constants, output, json;
};

Model model_of(const ModelOptions& options) {
  Model model = options.constants.empty() ? built_in_model() : read_model(options.constants);
  if (options.link_rate > 0)
    for (auto& [sms, rate] : model.limits.push) rate = std::min(rate, options.link_rate * 1e9);
  return model;
}

// The named network with the options' figures in place of its own.
Network network_of(const ModelOptions& options, const std::string& name) {
  const auto found = std::find_if(networks().begin(), networks().end(),
                                  [&](const Network& network) { return network.name == name; });
  if (found == networks().end()) {
    std::vector<std::string> names;
    for (const Network& network : networks()) names.push_back(network.name);
    throw UsageError(fmt::format("--network {}: must be one of {}", name, fmt::join(names, ", ")));
  }
  Network network = *found;
  if (options.nic_rate > 0) network.bytes_per_second = options.nic_rate * 1e9;
  if (options.nic_latency > 0) network.latency_us = options.nic_latency;
  if (options.nic_messages > 0) network.messages_per_second = options.nic_messages * 1e6;
  return network;
}

void check_shape(const RoutingShape& shape) {
  if (shape.ranks % shape.nodes != 0)
    throw UsageError(fmt::format("--nodes {}: must divide --ranks {}", shape.nodes, shape.ranks));
  if (shape.experts % shape.ranks != 0)
    throw UsageError(
        fmt::format("--experts {}: must be a multiple of --ranks {}", shape.experts, shape.ranks));
  if (shape.top_k > shape.experts)
    throw UsageError(fmt::format("--top-k {}: must not exceed --experts {}", shape.top_k, shape.experts));
}

// The trace that the options name; none for synth:uniform, whose loads are drawn without one.
std::optional<Trace> trace_of(const ModelOptions& options, int most_tokens) {
  if (options.trace == "synth:uniform") return std::nullopt;
  TraceOptions trace;
  trace.synth.experts = options.experts;
  trace.synth.top_k = options.top_k;
  trace.synth.tokens = std::min<std::int64_t>(kSimulatedTokens, std::int64_t{options.ranks} * most_tokens);
  return open_trace(options.trace, trace);
}

// Throws what an exchange refuses, such as a hidden size that the format cannot quantise.
Config config_of(const ConfigOptions& options, int experts, int top_k) {
  Trace outline;
  outline.experts = experts;
  outline.top_k = top_k;
  return make_config(options, outline);
}

ModelCall call_of(const ModelOptions& options, const RoutingShape& shape, Work work, Hops hops) {
  ModelCall call{.call = {.work = work,
                          .reduction = enumerator_named<Reduction>("--reduction", options.reduction),
                          .weighted = true,
                          .eager = options.launch == "eager",
                          .in_phases = options.form == "phases",
                          .sm_limit = options.sms},
                 .format = format_of(options.format),
                 .layout = enumerator_named<Layout>("--layout", options.layout),
                 .hidden = options.hidden,
                 .shape = shape,
                 .hops = hops};
  check_reduction(call.layout, call.call.reduction);
  config_of({.ranks = shape.ranks,
             .tokens = 1,
             .hidden = call.hidden,
             .layout = call.layout,
             .format = call.format,
             .reduction = call.call.reduction,
             .deadline_seconds = kHostDeadlineSeconds},
            shape.experts, shape.top_k);
  return call;
}

Work work_of(const std::string& name) {
  if (name == "plan") return Work::dispatch_plan;
  return name == "pair" ? Work::pair : name == "combine" ? Work::combine : Work::dispatch;
}

std::vector<Hops> hops_in(const ModelOptions& options) {
  if (options.nodes == 1 || options.hops == "one") return {Hops::one};
  if (options.hops == "two") return {Hops::two};
  return {Hops::one, Hops::two};
}

std::vector<PredictedCall> predicted_calls(const ModelOptions& options, const Model& model,
                                           const Network& network) {
  const std::vector<int> tokens = parse_sweep(options.tokens);
  const std::optional<Trace> trace = trace_of(options, *std::max_element(tokens.begin(), tokens.end()));
  std::vector<PredictedCall> calls;
  for (const int each : tokens) {
    RoutingShape shape{.ranks = options.ranks,
                       .nodes = options.nodes,
                       .tokens = each,
                       .experts = trace ? trace->experts : options.experts,
                       .top_k = trace ? trace->top_k : options.top_k};
    check_shape(shape);
    const Loads loads = trace ? trace_loads(shape, *trace) : uniform_loads(shape);
    for (const std::string& name : options.works) {
      for (const Hops hops : hops_in(options)) {
        const ModelCall call = call_of(options, shape, work_of(name), hops);
        calls.push_back({.call = call,
                         .router = trace ? trace->name : options.trace,
                         .cost = cost_of(call, loads, model.constants, model.limits, network),
                         .bytes = link_bytes(call, loads)});
      }
    }
  }
  return calls;
}

void state_times(const ModelOptions& options) {
  const Model model = model_of(options);
  const Network network = network_of(options, options.network.empty() ? "ib400" : options.network);
  const Output json(options.json);
  const std::vector<PredictedCall> calls = predicted_calls(options, model, network);
  const Network* shown = options.nodes > 1 ? &network : nullptr;
  write_report(json, times_json(model, shown, calls), times_table(model, shown, calls));
}

ScalePoint::Times times_at(const ModelOptions& options, const Model& model, const Network& network,
                           const RoutingShape& shape, const Loads& loads, Hops hops) {
  const ModelCall dispatch = call_of(options, shape, Work::dispatch, hops);
  const ModelCall combine = call_of(options, shape, Work::combine, hops);
  return {.dispatch = cost_of(dispatch, loads, model.constants, model.limits, network),
          .combine = cost_of(combine, loads, model.constants, model.limits, network),
          .dispatched = link_bytes(dispatch, loads),
          .combined = link_bytes(combine, loads)};
}

void state_scale(const ModelOptions& options) {
  if (options.trace != "synth:uniform")
    throw UsageError(
        "--scale with --trace: the number of experts grows with the ranks, so routing is synth:uniform");
  if ((options.node_ranks & (options.node_ranks - 1)) != 0)
    throw UsageError(fmt::format("--node-ranks {}: must be a power of two, which divides 16 to 1,024 ranks",
                                 options.node_ranks));
  const Model model = model_of(options);
  std::vector<std::string> names{"ib400", "ib800"};
  if (!options.network.empty()) names = {options.network};
  const Output json(options.json);
  const std::vector<int> tokens = parse_sweep(options.tokens);
  std::vector<ScaleTable> tables;
  for (const std::string& name : names) {
    tables.push_back({.network = network_of(options, name),
                      .node_ranks = options.node_ranks,
                      .what = fmt::format("{}, {}, K {}, hidden {}, uniform routing", options.format,
                                          options.layout, options.top_k, options.hidden),
                      .points = {}});
  }
  for (const int each : tokens) {
    for (int ranks = 16; ranks <= 1024; ranks *= 2) {
      RoutingShape shape{.ranks = ranks,
                         .nodes = std::max(1, ranks / options.node_ranks),
                         .tokens = each,
                         .experts = (options.experts + ranks - 1) / ranks * ranks,
                         .top_k = options.top_k};
      check_shape(shape);
      const Loads loads = uniform_loads(shape);
      for (ScaleTable& table : tables) {
        table.points.push_back({.ranks = ranks,
                                .nodes = shape.nodes,
                                .experts = shape.experts,
                                .tokens = each,
                                .one = times_at(options, model, table.network, shape, loads, Hops::one),
                                .two = times_at(options, model, table.network, shape, loads, Hops::two)});
      }
    }
  }
  write_report(json, scale_json(model, tables), scale_text(model, tables));
}

void state_memory(const ModelOptions& options) {
  const std::vector<int> tokens = parse_sweep(options.tokens);
  if (options.ranks % options.nodes != 0)
    throw UsageError(fmt::format("--nodes {}: must divide --ranks {}", options.nodes, options.ranks));
  std::vector<int> node_of_rank(static_cast<std::size_t>(options.ranks));
  for (std::size_t rank = 0; rank < node_of_rank.size(); ++rank)
    node_of_rank[rank] = static_cast<int>(rank) / (options.ranks / options.nodes);
  const Topology topology(node_of_rank);
  const Output json(options.json);
  std::vector<MemoryPoint> points;
  for (const int each : tokens) {
    for (const Hops hops : hops_in(options)) {
      ConfigOptions asked{.backend = options.nodes > 1 ? BackendKind::nvshmem : BackendKind::cuda,
                          .ranks = options.ranks,
                          .tokens = each,
                          .hidden = options.hidden,
                          .layout = enumerator_named<Layout>("--layout", options.layout),
                          .format = format_of(options.format),
                          .reduction = enumerator_named<Reduction>("--reduction", options.reduction),
                          .hops = options.nodes > 1 ? hops : Hops::automatic,
                          .deadline_seconds = kHostDeadlineSeconds};
      check_reduction(asked.layout, asked.reduction);
      const bool last = each == tokens.back() && hops == hops_in(options).back();
      for (MemoryPoint& point :
           memory_points(config_of(asked, options.experts, options.top_k), topology, last))
        points.push_back(std::move(point));
    }
  }
  write_report(json, memory_json(topology, points), memory_table(topology, points));
}

void calibrate_model(const ModelOptions& options) {
  if (options.calibrate.size() < 2)
    throw UsageError("--calibrate: must be a file of ferry limits, then one or more of ferry bench");
  const GpuLimits limits = read_limits(options.calibrate.front());
  std::vector<BenchRecord> records;
  for (std::size_t i = 1; i < options.calibrate.size(); ++i)
    records.push_back(read_bench(options.calibrate[i]));
  const Output output(options.output);
  Model model = calibrate(limits, records, model_of(options).constants);
  if (model.calibrated.empty())
    throw UsageError(fmt::format("{}: no line that the model has times of", options.calibrate[1]));
  Model fitted = model;  // the fit's own errors, for which no point is left out
  fitted.calibrated.clear();
  std::vector<PointError> errors;
  for (const BenchRecord& record : records)
    for (const PointError& one : errors_of(fitted, record)) errors.push_back(one);
  const ErrorSummary summary = summary_of(errors);
  write_report(
      output, json_of(model),
      fmt::format("{}\nFit       {}, median error {:.1f} %, worst {:.1f} %\n", constants_table(model),
                  report::counted(static_cast<std::int64_t>(summary.points), "point"), summary.median * 100,
                  summary.worst * 100));
}

void check_model(const ModelOptions& options) {
  const Model model = model_of(options);
  const Output json(options.json);
  std::vector<BenchRecord> read;
  for (const std::string& path : options.check) read.push_back(read_bench(path));
  std::vector<CheckedRecord> checked;
  std::vector<PointError> all;
  for (const BenchRecord& record : read) {
    CheckedRecord one{.path = record.path, .errors = errors_of(model, record), .left_out = record.left_out};
    one.calibrated = record.points.size() - one.errors.size();
    all.insert(all.end(), one.errors.begin(), one.errors.end());
    checked.push_back(std::move(one));
  }
  if (all.empty())
    throw UsageError(fmt::format("--check {}: no point is left to compare", options.check.front()));
  write_report(json, check_json(model, checked), check_table(checked));
  const ErrorSummary summary = summary_of(all);
  if (summary.median > kMedianTarget || summary.worst > kWorstTarget) {
    throw CheckFailed(
        fmt::format("the model's median error is {:.1f} % and its worst {:.1f} %; the targets are {:.0f} % "
                    "and {:.0f} %; calibrate "
                    "it on this machine with --calibrate",
                    summary.median * 100, summary.worst * 100, kMedianTarget * 100, kWorstTarget * 100));
  }
}

// For modes that read the calls from files.
void refuse_calls(const CLI::App& command, const char* reason) {
  refuse_given(command, {"--ranks",     "--nodes",   "--node-ranks", "--tokens",      "--trace",
                         "--experts",   "--top-k",   "--hidden",     "--format",      "--layout",
                         "--reduction", "--work",    "--form",       "--launch",      "--sms",
                         "--hops",      "--network", "--nic-rate",   "--nic-latency", "--nic-messages"},
               reason);
}

void check_modes(const CLI::App& command, const ModelOptions& options) {
  const int modes = (options.scale ? 1 : 0) + (options.memory ? 1 : 0) + (options.calibrate.empty() ? 0 : 1) +
                    (options.check.empty() ? 0 : 1);
  if (modes > 1) throw UsageError("--scale, --memory, --calibrate and --check: give one of them");
  if (!options.output.empty() && options.calibrate.empty())
    throw UsageError("-o: is for --calibrate; --json writes times and errors");
  if (!options.json.empty() && !options.calibrate.empty())
    throw UsageError("--json with --calibrate: -o FILE writes the constants as JSON");
  if (!options.calibrate.empty()) {
    constexpr const char* kReason = "--calibrate reads calls and limits from its files; leave it out";
    refuse_calls(command, kReason);
    refuse_given(command, {"--link-rate"}, kReason);
  } else if (!options.check.empty()) {
    refuse_calls(command, "--check reads calls from its files; leave it out");
  } else if (options.scale) {
    refuse_given(command, {"--ranks", "--nodes"},
                 "--scale tabulates 16 to 1,024 ranks on nodes of --node-ranks; leave it out");
    refuse_given(command, {"--hops", "--work"},
                 "--scale tabulates dispatch and combine, in one hop and in two; leave it out");
  } else {
    if (options.memory)
      refuse_given(command,
                   {"--trace", "--work", "--form", "--launch", "--sms", "--network", "--nic-rate",
                    "--nic-latency", "--nic-messages", "--link-rate", "--constants"},
                   "--memory takes no times; leave it out");
    refuse_given(command, {"--node-ranks"}, "is for --scale; give --ranks and --nodes instead");
    if (options.nodes > 1) return;
    refuse_given(command, {"--hops", "--network", "--nic-rate", "--nic-latency", "--nic-messages"},
                 "one node has no network between nodes; add --nodes N");
  }
}

void run_model(const CLI::App& command, const ModelOptions& options) {
  check_modes(command, options);
  if (!options.calibrate.empty()) return calibrate_model(options);
  if (!options.check.empty()) return check_model(options);
  if (options.scale) return state_scale(options);
  if (options.memory) return state_memory(options);
  state_times(options);
}

void add_call_options(CLI::App& command, ModelOptions& options) {
  add_number(command, "-n,--ranks", options.ranks, "ranks, one GPU each, at most 1048576; default 8", 1,
             kMostExperts);
  add_count(command, "--nodes", options.nodes, "nodes that the ranks are divided among equally; default 1");
  add_text(command, "--tokens", options.tokens,
           "tokens per rank and call: 1:8192 doubles from 1 to 8192,\n1,5,64 is a list; default 1,128,4096",
           "LIST");
  add_text(command, "--trace", options.trace,
           "routing: synth:uniform (default), synth:decode,\nsynth:prefill, or a recorded trace", "NAME");
  add_number(command, "--experts", options.experts, "experts; default 256, or those of a recorded trace", 1,
             kMostExperts);
  add_number(command, "--top-k", options.top_k, "experts per token; default 8, or those of a recorded trace",
             1, kMaxTopK);
  add_count(command, "--hidden", options.hidden, "values of a token; default 7168");
  add_text(command, "--format", options.format, "format of the rows, as in ferry bench; default bf16",
           "NAME");
  add_choice(command, "--layout", options.layout, "expert_major (default), expert_padded or rank_major",
             {"expert_major", "expert_padded", "rank_major"});
  add_choice(command, "--reduction", options.reduction, "of combine: partial (default), exact or unreduced",
             {"partial", "exact", "unreduced"});
  add_names(command, "--work", options.works, {"dispatch", "plan", "combine", "pair"},
            "calls, any of dispatch (default), plan, combine\n(default), pair");
  add_choice(command, "--form", options.form, "fused (default) or phases", {"fused", "phases"});
  add_choice(command, "--launch", options.launch, "graph (default) or eager", {"graph", "eager"});
  add_number(command, "--sms", options.sms, "SMs of a call at most; default 0: no limit", 0, 1024);
}

void add_network_options(CLI::App& command, ModelOptions& options) {
  constexpr double kMost = 1e6, kLeast = 1e-3;
  add_choice(command, "--hops", options.hops, "between nodes: one, two or both (default)",
             {"one", "two", "both"});
  add_text(command, "--network", options.network,
           "between nodes: ib200, ib400 (default), ib800: a NIC of so\nmany Gb/s for each rank; roce400: for "
           "two ranks",
           "NAME");
  add_number(command, "--nic-rate", options.nic_rate,
             "GB/s of a rank between nodes, in place of the network's", kLeast, kMost);
  add_number(command, "--nic-latency", options.nic_latency,
             "us of a put and its flag, in place of the network's", kLeast, kMost);
  add_number(command, "--nic-messages", options.nic_messages,
             "million messages a second of a rank, in place of the\nnetwork's", kLeast, kMost);
  add_number(command, "--link-rate", options.link_rate,
             "GB/s out of a rank within its node, in place of the best\nmeasured push rate", kLeast, kMost);
}

}  // namespace

void add_model(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("model", "Compute times of dispatch and combine from measured constants");
  command->footer(kModelFooter);
  const auto options = std::make_shared<ModelOptions>();
  add_call_options(*command, *options);
  add_network_options(*command, *options);
  command->add_flag("--scale", options->scale, "tabulate 16 to 1,024 ranks, in one hop and in two hops");
  command->add_flag("--memory", options->memory,
                    "bytes that an exchange maps on a rank, and what lowers them");
  add_count(*command, "--node-ranks", options->node_ranks,
            "--scale: ranks of a node, a power of two; default 8");
  command
      ->add_option("--calibrate", options->calibrate,
                   "find the constants from a file of ferry limits and one or\nmore of ferry bench")
      ->expected(1, -1)
      ->type_name("LIMITS BENCH...");
  command
      ->add_option("--check", options->check, "compare the model with files of ferry bench, point by point")
      ->expected(1, -1)
      ->type_name("FILE...");
  add_text(*command, "--constants", options->constants,
           "constants that --calibrate has written; default: built in", "FILE");
  add_output(*command, "-o,--output", options->output,
             "--calibrate: write the constants as JSON; - is stdout");
  add_json(*command, options->json);
  command->callback([command, options] { run_model(*command, *options); });
}

}  // namespace ferry::app
