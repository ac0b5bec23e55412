#include "tools/ferry/run/report.hpp"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>

#include "backends/cpu/relay.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "ferry/version.hpp"
#include "format/parts.hpp"
#include "layout/exchange_layout.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/common/traces.hpp"
#include "tools/ferry/run/expected.hpp"
#include "tools/ferry/run/swiglu.hpp"
#include "tools/report/forms.hpp"
#include "trace/trace.hpp"

namespace ferry::app {

namespace {

// The precision and the library of the experts' matrix products.
std::string expert_arithmetic(const RunSpec& spec) {
  if (!on_device(spec.config)) return fmt::format("fp32, {}", blas_name());
  return fmt::format("{} with fp32 accumulation, cuBLAS", to_string(spec.type));
}

const char* group_of(const RunSpec& spec) {
  if (spec.options.on_mpi()) return "mpi";
  return spec.options.processes ? "processes" : "threads";
}

}  // namespace

report::TraceUse workload_of(const RunSpec& spec) {
  report::TraceUse workload{.trace = spec.trace.name,
                            .synthesised = spec.synth.has_value(),
                            .description = spec.trace.source,
                            .layers = spec.trace.layers,
                            .tokens = spec.trace.tokens,
                            .tokens_per_rank = spec.tokens(),
                            .steps = spec.options.steps};
  if (spec.synth) {
    workload.trace = short_name(spec.trace.name);
    workload.recipe = trace::to_string(*spec.synth);
    workload.seed = spec.synth->seed;
  }
  return workload;
}

report::Configuration configuration_of(const RunSpec& spec, const Topology& topology) {
  std::vector<int> node_of_rank;
  for (int rank = 0; rank < topology.ranks(); ++rank) node_of_rank.push_back(topology.node_of(rank));
  return {.backend = to_string(spec.config.backend),
          .ranks = spec.options.ranks,
          .group = group_of(spec),
          .nodes = topology.nodes(),
          .simulated_nodes = topology.simulated(),
          .node_of_rank = node_of_rank,
          .hops = to_string(chosen_hops(spec.config, topology)),
          .input = spec.options.input,
          .experts = spec.config.experts,
          .shared_experts = spec.config.shared_experts,
          .top_k = spec.config.top_k,
          .hidden = spec.config.hidden,
          .max_tokens = spec.config.max_tokens,
          .layout = to_string(spec.config.layout),
          .format = to_string(spec.config.format),
          .reduction = to_string(spec.config.reduction),
          .reduction_level = to_string(chosen_level(spec.config, topology)),
          .combine_type = to_string(spec.config.combine_type),
          .expert_function =
              fmt::format("SwiGLU, {} inner columns, {}", spec.options.inner, expert_arithmetic(spec))};
}

report::Check check_of(const char* name, const CheckCounter& counter, const std::string& description) {
  return {
      .name = name,
      .passed = counter.wrong == 0 && counter.compared > 0,
      .compared = counter.compared,
      .wrong = counter.wrong,
      .detail = counter.wrong == 0 ? description : "first at " + std::string(counter.first_failure.data())};
}

namespace {

CheckCounter total(const RunSpec& spec, const SharedResults& results, CheckCounter RankResults::* member) {
  CheckCounter sum;
  for (int rank = 0; rank < spec.options.ranks; ++rank) sum.add(results.rank(rank).*member);
  return sum;
}

std::int64_t sum_over_ranks(const RunSpec& spec, const SharedResults& results,
                            std::int64_t RankResults::* member) {
  std::int64_t sum = 0;
  for (int rank = 0; rank < spec.options.ranks; ++rank) sum += results.rank(rank).*member;
  return sum;
}

// Bytes of one dispatch message, and of one row of combine's staging buffers.
std::int64_t dispatch_message(const RunSpec& spec) {
  const PartList parts = parts_of(spec.config.format, spec.config.hidden);
  return on_device(spec.config) ? device_message_bytes(device_message_layout(parts), spec.config.top_k)
                                : message_layout(parts, spec.config.top_k).bytes;
}

std::int64_t combine_message(const RunSpec& spec, const Topology& topology) {
  Config chosen = spec.config;
  chosen.hops = chosen_hops(chosen, topology);
  chosen.reduction_level = chosen_level(chosen, topology);
  const bool over_windows = chosen.backend == BackendKind::nvshmem && topology.nodes() > 1;
  const bool packed = on_device(chosen) && (chosen.backend == BackendKind::collective || over_windows ||
                                            has_relays(chosen, topology));
  if (relays_add(chosen) && !packed)
    return spec.row_bytes() + static_cast<std::int64_t>(sizeof(cpu::SumHead));
  if (packed)
    return labelled_row_bytes(combine_row_layout(chosen.combine_type, chosen.hidden, chosen.top_k).bytes);
  const bool partial = chosen.reduction == Reduction::partial;
  return spec.row_bytes() + (partial ? 0 : static_cast<std::int64_t>(sizeof(RouteTail)));
}

report::Traffic traffic_of(const RunSpec& spec, std::span<const std::int64_t> messages,
                           std::int64_t message_bytes) {
  report::Traffic out;
  const auto ranks = static_cast<std::size_t>(spec.options.ranks);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    out.traffic_bytes.push_back(messages[i] * message_bytes);
    if (i / ranks != i % ranks) out.wire_bytes += messages[i] * message_bytes;
    if (i / ranks != i % ranks) out.messages += messages[i];
  }
  return out;
}

// On device memory a message to a relay has the token once, and for each rank that it is for an entry and the
// token's slots there. Kernels send no entry to a node of one rank.
void count_entries(const RunSpec& spec, const Topology& topology, const SharedResults& results,
                   report::Traffic* traffic) {
  if (!on_device(spec.config) || !has_relays(spec.config, topology)) return;
  const auto ranks = static_cast<std::size_t>(spec.options.ranks);
  const auto packet = static_cast<std::int64_t>(sizeof(LLPacket)), slots = packet * spec.config.top_k;
  for (std::size_t i = 0; i < ranks * ranks; ++i) {
    const bool alone = topology.ranks_of(topology.node_of(static_cast<int>(i % ranks))).size() == 1;
    const std::int64_t entry = has_kernels(spec.config.backend) && alone ? 0 : packet;
    const std::int64_t more =
        results.dispatch_entries()[i] * (entry + slots) - results.dispatch_messages()[i] * slots;
    if (results.dispatch_entries()[i] == 0) continue;
    traffic->traffic_bytes[i] += more;
    traffic->wire_bytes += more;
  }
}

// What is sent to other ranks.
struct Sent {
  std::int64_t bytes, messages, bytes_between_nodes;

  bool operator==(const Sent&) const = default;
};

Sent planned_of(const report::Traffic& traffic, const Topology& topology, const Config& config) {
  Sent sent{traffic.wire_bytes, traffic.messages, 0};
  if (config.backend == BackendKind::cuda && !has_relays(config, topology)) return sent;  // not counted apart
  const auto ranks = static_cast<std::size_t>(topology.ranks());
  for (std::size_t i = 0; i < traffic.traffic_bytes.size(); ++i) {
    const auto from = static_cast<int>(i / ranks), to = static_cast<int>(i % ranks);
    if (topology.node_of(from) != topology.node_of(to)) sent.bytes_between_nodes += traffic.traffic_bytes[i];
  }
  return sent;
}

// Compares what the ranks counted while writing with what the plans imply.
report::Check check_wire(const char* name, const Sent& planned, const Sent& counted) {
  CheckCounter counter;
  const bool same = planned == counted;
  if (same) counter.pass(counted.messages);
  if (!same) {
    counter.fail(
        std::max<std::int64_t>(counted.messages, 1),
        fmt::format("counted {} bytes in {} messages, {} bytes between nodes; planned {} bytes in {} "
                    "messages, {} bytes between nodes",
                    counted.bytes, counted.messages, counted.bytes_between_nodes, planned.bytes,
                    planned.messages, planned.bytes_between_nodes));
  }
  report::Check check =
      check_of(name, counter, "messages that the exchange counted, against those that the routes imply");
  check.passed = same;
  return check;
}

void add_traffic(const RunSpec& spec, const Topology& topology, const SharedResults& results,
                 report::RunReport& run) {
  const std::int64_t rows = sum_over_ranks(spec, results, &RankResults::rows);
  const std::int64_t rank_steps = std::int64_t{spec.options.steps} * spec.options.ranks;
  run.dispatch = traffic_of(spec, results.dispatch_messages(), dispatch_message(spec));
  count_entries(spec, topology, results, &run.dispatch);
  run.dispatch.moved_bytes =
      rank_steps * spec.tokens() * spec.row_bytes() + 2 * run.dispatch.wire_bytes +
      sum_over_ranks(spec, results, &RankResults::stored_rows) * received_row_bytes(spec.config);
  run.combine = traffic_of(spec, results.combine_messages(), combine_message(spec, topology));
  run.combine.moved_bytes =
      rows * spec.row_bytes() + 2 * run.combine.wire_bytes + rank_steps * spec.result_bytes();
}

void add_checks(const RunSpec& spec, const Topology& topology, const SharedResults& results,
                report::RunReport& run) {
  run.checks.push_back(
      check_of("dispatch, bit for bit", total(spec, results, &RankResults::dispatch),
               "counts, offsets, sources, weights and values of every row against the oracle"));
  run.checks.push_back(
      check_of("combine, bit for bit", total(spec, results, &RankResults::combine),
               "scaling experts, against the same sums computed on the source rank in the specified order"));
  const CheckCounter dense = total(spec, results, &RankResults::dense);
  report::Check swiglu = check_of("SwiGLU against dense fp32", dense,
                                  "against experts applied on the source rank, without an exchange");
  swiglu.error = dense.max_error;
  swiglu.tolerance = kTolerance;
  run.checks.push_back(swiglu);
  run.checks.push_back(check_of("timed results equal checked results",
                                total(spec, results, &RankResults::repeated),
                                "hash of every rank's result in every step"));
  const auto sum = [&](std::int64_t RankResults::* member) { return sum_over_ranks(spec, results, member); };
  run.checks.push_back(
      check_wire("dispatch bytes as planned", planned_of(run.dispatch, topology, spec.config),
                 {sum(&RankResults::dispatch_wire_bytes), sum(&RankResults::dispatch_messages),
                  sum(&RankResults::dispatch_bytes_between_nodes)}));
  run.checks.push_back(check_wire("combine bytes as planned", planned_of(run.combine, topology, spec.config),
                                  {sum(&RankResults::combine_wire_bytes), sum(&RankResults::combine_messages),
                                   sum(&RankResults::combine_bytes_between_nodes)}));
}

void add_load(const RunSpec& spec, const SharedResults& results, report::RunReport& run) {
  run.load.routes_per_expert.assign(results.routes().begin(), results.routes().end());
  for (const ExpertLocation& location : spec.config.placement.locations())
    run.load.rank_of_expert.push_back(location.rank);
  const std::int64_t shared = std::int64_t{spec.config.shared_experts} * spec.tokens() * spec.options.steps;
  for (int rank = 0; rank < spec.options.ranks; ++rank)
    run.load.rows_per_rank.push_back(results.rank(rank).rows - shared);
  run.load.shared_rows_per_rank = shared;
  run.load.dropped_routes = results.dropped();
}

// Shifts all times so that the first timed dispatch begins at 0.
void add_times(const SharedResults& results, report::RunReport& run) {
  run.times.assign(results.step_times().begin(), results.step_times().end());
  double first = run.times.front()[report::StepStage::dispatch].begin_us;
  for (const report::StepTimes& times : run.times)
    first = std::min(first, times[report::StepStage::dispatch].begin_us);
  for (report::StepTimes& times : run.times) {
    for (report::Span& span : times.stages) span = {span.begin_us - first, span.end_us - first};
  }
}

}  // namespace

report::RunReport make_report(const RunSpec& spec, const Topology& topology, const SharedResults& results) {
  report::RunReport run;
  run.ferry_version = version();
  run.command = command_line();
  run.workload = workload_of(spec);
  run.configuration = configuration_of(spec, topology);
  run.machine = {.cpu = cpu_name(), .cores = cores(), .memory_bytes = memory_bytes()};
  add_traffic(spec, topology, results, run);
  add_checks(spec, topology, results, run);
  add_load(spec, results, run);
  add_times(results, run);
  return run;
}

std::shared_ptr<const report::RunReport> read_earlier_run(const std::string& path) {
  if (path.empty()) return nullptr;
  const std::string name = "--compare " + path, remedy = "it takes what ferry run --json FILE has written";
  return read_json_file(path, name, remedy, [](const nlohmann::ordered_json& json) {
    return std::make_shared<const report::RunReport>(report::from_json(json));
  });
}

}  // namespace ferry::app
