#include "tools/ferry/run/report.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "ferry/version.hpp"
#include "format/parts.hpp"
#include "layout/device_message.hpp"
#include "layout/message.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/run/combine_check.hpp"
#include "tools/ferry/run/multiply.hpp"
#include "trace/synth.hpp"

namespace ferry::app {

namespace {

// synth:decode of synth:decode:experts=256,... : the whole is the recipe.
std::string short_name(const std::string& name) {
  return name.substr(0, name.find(':', name.find(':') + 1));
}

report::Played played_of(const Job& job) {
  report::Played played{.trace = job.trace.name,
                        .synthesised = job.synth.has_value(),
                        .description = job.trace.source,
                        .layers = job.trace.layers,
                        .tokens = job.trace.tokens,
                        .tokens_per_rank = job.tokens(),
                        .steps = job.options.steps};
  if (job.synth) {
    played.trace = short_name(job.trace.name);
    played.recipe = trace::to_string(*job.synth);
    played.seed = job.synth->seed;
  }
  return played;
}

// What computes the experts' products.
std::string expert_arithmetic(const Job& job) {
  if (job.config.backend != BackendKind::cuda) return fmt::format("fp32, {}", multiply_name());
  return fmt::format("{} with sums in fp32, cuBLAS", to_string(job.type));
}

report::Configuration configuration_of(const Job& job) {
  return {.backend = to_string(job.config.backend),
          .ranks = job.options.ranks,
          .group = job.options.processes ? "processes" : "threads",
          .experts = job.config.experts,
          .top_k = job.config.top_k,
          .hidden = job.config.hidden,
          .max_tokens = job.config.max_tokens,
          .layout = to_string(job.config.layout),
          .format = to_string(job.config.format),
          .reduction = to_string(job.config.reduction),
          .wire = to_string(job.config.combine_type),
          .expert_function =
              fmt::format("SwiGLU, {} inner columns, {}", job.options.inner, expert_arithmetic(job))};
}

Tally total(const Job& job, const Board& board, Tally RankResults::* which) {
  Tally sum;
  for (int rank = 0; rank < job.options.ranks; ++rank) sum.add(board.rank(rank).*which);
  return sum;
}

report::Check check_of(const char* name, const Tally& tally, const std::string& about) {
  return {.name = name,
          .passed = tally.wrong == 0 && tally.compared > 0,
          .compared = tally.compared,
          .wrong = tally.wrong,
          .detail = tally.wrong == 0 ? about : "first at " + std::string(tally.first.data())};
}

std::int64_t sum_over_ranks(const Job& job, const Board& board, std::int64_t RankResults::* which) {
  std::int64_t sum = 0;
  for (int rank = 0; rank < job.options.ranks; ++rank) sum += board.rank(rank).*which;
  return sum;
}

// Bytes of one message of dispatch, of one row of combine's staging.
std::int64_t dispatch_message(const Job& job) {
  const PartList parts = parts_of(job.config.format, job.config.hidden);
  const bool device = job.config.backend == BackendKind::cuda;
  return device ? device_message_bytes(device_message_layout(parts), job.config.top_k)
                : message_layout(parts, job.config.top_k).bytes;
}

std::int64_t combine_message(const Job& job) {
  const std::int64_t tail =
      job.config.reduction == Reduction::partial ? 0 : static_cast<std::int64_t>(sizeof(RouteTail));
  return job.row_bytes() + tail;
}

report::Carried carried(const Job& job, std::span<const std::int64_t> messages, std::int64_t message_bytes) {
  report::Carried out;
  const auto ranks = static_cast<std::size_t>(job.options.ranks);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    out.traffic_bytes.push_back(messages[i] * message_bytes);
    if (i / ranks != i % ranks) out.wire_bytes += messages[i] * message_bytes;
    if (i / ranks != i % ranks) out.messages += messages[i];
  }
  return out;
}

// The ranks counted what they wrote; the traffic comes from the plans. They must agree.
report::Check check_wire(const char* name, const report::Carried& planned, std::int64_t bytes,
                         std::int64_t messages) {
  Tally tally;
  const bool same = planned.wire_bytes == bytes && planned.messages == messages;
  if (same) tally.right(messages);
  if (!same) {
    tally.fail(std::max<std::int64_t>(messages, 1),
               fmt::format("{} bytes in {} messages counted, {} bytes in {} planned", bytes, messages,
                           planned.wire_bytes, planned.messages));
  }
  report::Check check =
      check_of(name, tally, "messages counted by the exchange = (token, rank) pairs of the plans");
  check.passed = same;
  return check;
}

std::int64_t arrived_row_bytes(const Job& job) {
  const PartList parts = parts_of(job.config.format, job.config.hidden);
  std::int64_t bytes = 0;
  for (int p = 0; p < parts.count; ++p) bytes += parts.part[p].row_bytes;
  return bytes;
}

void add_traffic(const Job& job, const Board& board, report::RunReport& run) {
  const std::int64_t rows = sum_over_ranks(job, board, &RankResults::rows);
  const std::int64_t home = std::int64_t{job.options.steps} * job.options.ranks;
  run.dispatch = carried(job, board.dispatch_messages(), dispatch_message(job));
  run.dispatch.moved_bytes =
      home * job.tokens() * job.row_bytes() + 2 * run.dispatch.wire_bytes + rows * arrived_row_bytes(job);
  run.combine = carried(job, board.combine_messages(), combine_message(job));
  run.combine.moved_bytes = rows * job.row_bytes() + 2 * run.combine.wire_bytes + home * job.result_bytes();
}

void add_checks(const Job& job, const Board& board, report::RunReport& run) {
  run.checks.push_back(
      check_of("dispatch, to the bit", total(job, board, &RankResults::dispatch),
               "counts, offsets, sources, weights and values of every row against the oracle"));
  run.checks.push_back(
      check_of("combine, to the bit", total(job, board, &RankResults::combine),
               "elementwise experts, against the sums done again at home in their defined order"));
  const Tally dense = total(job, board, &RankResults::dense);
  report::Check swiglu =
      check_of("SwiGLU against dense fp32", dense, "tokens computed where they are, without an exchange");
  swiglu.error = dense.error;
  swiglu.tolerance = kTolerance;
  run.checks.push_back(swiglu);
  run.checks.push_back(check_of("timed results are the checked ones",
                                total(job, board, &RankResults::repeated),
                                "hashes of every rank's result in every step"));
  run.checks.push_back(check_wire("bytes of dispatch as planned", run.dispatch,
                                  sum_over_ranks(job, board, &RankResults::dispatch_wire_bytes),
                                  sum_over_ranks(job, board, &RankResults::dispatch_messages)));
  run.checks.push_back(check_wire("bytes of combine as planned", run.combine,
                                  sum_over_ranks(job, board, &RankResults::combine_wire_bytes),
                                  sum_over_ranks(job, board, &RankResults::combine_messages)));
}

void add_load(const Job& job, const Board& board, report::RunReport& run) {
  run.load.routes_per_expert.assign(board.routes().begin(), board.routes().end());
  for (const ExpertLocation& place : job.config.placement.places())
    run.load.rank_of_expert.push_back(place.rank);
  for (int rank = 0; rank < job.options.ranks; ++rank)
    run.load.rows_per_rank.push_back(board.rank(rank).rows);
  run.load.dropped_routes = board.dropped();
}

// The timed part begins at 0: what went before is not shown.
void add_times(const Board& board, report::RunReport& run) {
  run.times.assign(board.all_times().begin(), board.all_times().end());
  double first = run.times.front()[report::Phase::dispatch].begin_us;
  for (const report::StepTimes& times : run.times)
    first = std::min(first, times[report::Phase::dispatch].begin_us);
  for (report::StepTimes& times : run.times) {
    for (report::Span& span : times.phases) span = {span.begin_us - first, span.end_us - first};
  }
}

}  // namespace

report::RunReport make_report(const Job& job, const Board& board) {
  report::RunReport run;
  run.ferry_version = version();
  run.command = command_line();
  run.played = played_of(job);
  run.configuration = configuration_of(job);
  run.machine = {.cpu = cpu_name(), .cores = cores(), .memory_bytes = memory_bytes()};
  add_traffic(job, board, run);
  add_checks(job, board, run);
  add_load(job, board, run);
  add_times(board, run);
  return run;
}

}  // namespace ferry::app
