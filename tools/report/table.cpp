#include "tools/report/forms.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "tools/report/parts.hpp"
#include "tools/report/summary.hpp"
#include "tools/report/units.hpp"

namespace ferry::report {
namespace {

constexpr int kMostRankLines = 16;

using Buffer = fmt::memory_buffer;

template <class... Args>
void line(Buffer& out, fmt::format_string<Args...> format, Args&&... args) {
  fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
  out.push_back('\n');
}

void add_workload(Buffer& out, const TraceUse& workload) {
  const std::string seed = workload.seed ? fmt::format(", seed {}", *workload.seed) : "";
  line(out, "{:<10}{} ({}{})", "Trace", workload.trace, workload.synthesised ? "synthesised" : "recorded",
       seed);
  if (!workload.recipe.empty()) line(out, "{:10}{}", "", workload.recipe);
  line(out, "{:10}{} of {}; {} of {} per rank", "", counted(workload.layers, "layer"),
       counted(workload.tokens, "token"), counted(workload.steps, "step"),
       counted(workload.tokens_per_rank, "token"));
}

void add_configuration(Buffer& out, const Configuration& at) {
  const std::string nodes =
      at.nodes == 1
          ? ""
          : fmt::format(" on {}", counted(at.nodes, at.simulated_nodes ? "simulated node" : "node"));
  const std::string level = at.reduction_level == "node" ? " by node" : "";
  const std::string input = at.input == "own" ? "" : fmt::format(", {} input", at.input);
  line(out, "{:<10}{} backend, {} ({}){}, E {}, K {}, H {}, T {}", "Exchange", at.backend,
       counted(at.ranks, "rank"), at.group, nodes + (at.hops == "two" ? ", two hops" : "") + input,
       at.experts, at.top_k, at.hidden, at.max_tokens);
  line(out, "{:10}{}, {}; combine {}{}, {} rows", "", at.layout, at.format, at.reduction, level,
       at.combine_type);
  const std::string shared =
      at.shared_experts == 0 ? ""
                             : fmt::format("; {} on every rank", counted(at.shared_experts, "shared one"));
  line(out, "{:<10}{}{}", "Experts", at.expert_function, shared);
}

void add_machine(Buffer& out, const Machine& machine, const Configuration& at) {
  line(out, "{:<10}{}, {}, {}", "Machine", machine.cpu, counted(machine.cores, "core"),
       in_bytes(static_cast<double>(machine.memory_bytes)));
  if (machine.memcpy_bytes_per_second > 0) {
    line(out, "{:10}memcpy by {}: {} read and written", "", counted(machine.memcpy_threads, "thread"),
         in_bytes_per_second(machine.memcpy_bytes_per_second));
  } else {
    line(out, "{:10}memcpy: not measured", "");
  }
  if (at.backend != "cuda" && at.group != "mpi" && at.ranks > machine.cores)
    line(out, "{:10}{} on {}: times include waiting for a core", "", counted(at.ranks, "rank"),
         counted(machine.cores, "core"));
}

std::string outcome_of(const Check& check) {
  std::string text = with_thousands(check.compared) + " compared, " + with_thousands(check.wrong) + " wrong";
  if (check.error) text += fmt::format(", relative error {:.1e}", *check.error);
  if (check.tolerance) text += fmt::format(", {:.1e} allowed", *check.tolerance);
  return text;
}

void add_checks(Buffer& out, const std::vector<Check>& checks, bool coloured) {
  const char* heading = "Checks";
  for (const Check& check : checks) {
    line(out, "{:<10}{}  {}: {}", heading,
         check.passed ? toned("passed", Tone::good, coloured) : toned("FAILED", Tone::bad, coloured),
         check.name, outcome_of(check));
    if (!check.passed && !check.detail.empty()) line(out, "{:18}{}", "", check.detail);
    heading = "";
  }
  const auto passed = static_cast<std::size_t>(std::ranges::count(checks, true, &Check::passed));
  const std::string sum = fmt::format("{} of {} checks passed", passed, checks.size());
  line(out, "{:10}{}", "", toned(sum, passed == checks.size() ? Tone::good : Tone::bad, coloured));
}

void add_latency(Buffer& out, const char* name, const Latency& latency) {
  line(out, "{:<10}{:>11}{:>11}{}{:>11}{:>11}", name, in_time(latency.p50_us), in_time(latency.p90_us),
       latency.p99_us ? fmt::format("{:>11}", in_time(*latency.p99_us)) : "", in_time(latency.max_us),
       in_time(latency.mean_us));
}

void add_latencies(Buffer& out, const Summary& summary) {
  line(out, "{:<10}{:>11}{:>11}{}{:>11}{:>11}", "Time", "p50", "p90",
       summary.step.p99_us ? fmt::format("{:>11}", "p99") : "", "max", "mean");
  for (const StepStage stage : kStages) add_latency(out, to_string(stage), summary[stage]);
  add_latency(out, "step", summary.step);
  const StepShares& shares = summary.shares;
  line(out, "{:10}mean of a rank: dispatch {} + experts {} + combine {} + waiting {} = step {}", "",
       in_time(shares.dispatch_us), in_time(shares.experts_us), in_time(shares.combine_us),
       in_time(shares.waiting_us), in_time(shares.step_us));
}

void add_flow(Buffer& out, const char* name, const Traffic& traffic, const Flow& flow, int steps) {
  const std::string share = flow.share_of_memcpy ? in_percent(*flow.share_of_memcpy) : std::string("-");
  line(out, "{:<10}{:>11}{:>11}{:>11}{:>11}{:>11}", name,
       in_bytes(static_cast<double>(traffic.wire_bytes) / steps),
       in_bytes(static_cast<double>(flow.local_bytes) / steps),
       in_bytes(static_cast<double>(traffic.moved_bytes) / steps), in_bytes_per_second(flow.bytes_per_second),
       share);
}

void add_flows(Buffer& out, const RunReport& run, const Summary& summary) {
  line(out, "{:<10}{:>11}{:>11}{:>11}{:>11}{:>11}", "Per step", "wire bytes", "local", "moved", "bandwidth",
       "of memcpy");
  add_flow(out, "dispatch", run.dispatch, summary.dispatch, run.workload.steps);
  add_flow(out, "combine", run.combine, summary.combine, run.workload.steps);
  if (run.configuration.nodes == 1) return;
  const auto per_step = [&](const Flow& flow) {
    return in_bytes(static_cast<double>(flow.between_nodes_bytes) / run.workload.steps);
  };
  line(out, "{:10}between nodes: dispatch {}, combine {}", "", per_step(summary.dispatch),
       per_step(summary.combine));
}

void add_ranks(Buffer& out, const RunReport& run, const Summary& summary) {
  if (run.configuration.ranks > kMostRankLines) return;
  line(out, "{:<10}{:>11}{:>11}{:>11}{:>11}", "All steps", "rows", "of mean", "sends", "receives");
  for (int rank = 0; rank < run.configuration.ranks; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    const std::int64_t rows = run.load.rows_per_rank[at];
    const double over_mean = summary.rank.mean > 0 ? static_cast<double>(rows) / summary.rank.mean : 0.0;
    line(out, "rank {:<5}{:>11}{:>11}{:>11}{:>11}", rank, with_thousands(rows), in_times(over_mean),
         in_bytes(static_cast<double>(summary.dispatch.sent_bytes[at])),
         in_bytes(static_cast<double>(summary.dispatch.received_bytes[at])));
  }
  out.push_back('\n');
}

void add_busiest(Buffer& out, const RunReport& run, const Summary& summary) {
  line(out, "{:<10}rank {}: {} the mean of {} rows", "Busiest", summary.rank.index,
       in_times(summary.rank.over_mean), in_mean(summary.rank.mean));
  line(out, "{:10}expert {} on rank {}: {} the mean of {} routes; {} idle", "", summary.expert.index,
       run.load.rank_of_expert[static_cast<std::size_t>(summary.expert.index)],
       in_times(summary.expert.over_mean), in_mean(summary.expert.mean),
       counted(summary.idle_experts, "expert"));
  if (run.load.dropped_routes > 0)
    line(out, "{:<10}{} beyond the capacity", "Dropped", counted(run.load.dropped_routes, "route"));
  line(out, "{:<10}{} tokens/s", "Rate", with_thousands(std::llround(summary.tokens_per_second)));
}

}  // namespace

std::string to_table(const RunReport& run, bool coloured) {
  const Summary summary = summarise(run);
  Buffer out;
  add_workload(out, run.workload);
  add_configuration(out, run.configuration);
  add_machine(out, run.machine, run.configuration);
  add_checks(out, run.checks, coloured);
  out.push_back('\n');
  add_latencies(out, summary);
  out.push_back('\n');
  add_flows(out, run, summary);
  out.push_back('\n');
  add_ranks(out, run, summary);
  add_busiest(out, run, summary);
  if (run.compared_with)
    fmt::format_to(std::back_inserter(out), "\n{}", comparison_table(to_json(run, 1), coloured));
  return fmt::to_string(out);
}

}  // namespace ferry::report
