#include <fmt/core.h>

#include <algorithm>

#include "plan/shapes.hpp"
#include "tools/ferry/bench/gpu_inputs.hpp"
#include "tools/ferry/bench/gpu_timer.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/bench/runners.hpp"
#include "tools/ferry/bench/traffic.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/gpu.hpp"

namespace ferry::app {

namespace {

bool applies_weights(const BenchPoint& point, const TimedCall& call) {
  return call.weighted && combine_applies_weights(point.config.layout, call.reduction);
}

Plan plan_of(const GpuInputSet& set) {
  return Plan::over(set.plan.as<void>(), static_cast<std::size_t>(set.plan.bytes()));
}

// The token count for Work::metadata, different on every rank and in every set.
std::int32_t token_count(int set, int rank) {
  return 1000 * (set + 1) + 7 * rank * rank;
}

// Measurements of one rank in one call.
struct RankTimes {
  std::vector<double> seconds;  // of a call, by replay
  double host_seconds = 0;      // eager only: time of the calling thread in a call
  std::int64_t wire_bytes = 0;  // in one pass over the input sets
  std::int64_t rows_checked = 0;
};

// Checks and times one rank's calls of a case.
class GpuBenchRunner {
 public:
  GpuBenchRunner(const Rank& rank, const GpuCase& gpu_case, const BenchInputs& inputs, TokenTables& tables)
      : rank_(rank),
        case_(gpu_case),
        point_(gpu_case.point),
        inputs_(inputs),
        tables_(tables),
        exchange_(rank, point_.config),
        stream_(rank),
        timer_(rank, point_, stream_, [this] { exchange_.synchronize({.stream = stream_}); }),
        inputs_on_gpu_(rank, point_, inputs),
        result_(point_.result_bytes()),
        counts_(kSets * 4),
        result_copy_(static_cast<std::size_t>(result_.bytes())) {
    if (point_.global_scale != 1) global_scale_ = GpuBuffer::of(point_.global_scale);
  }

  // One entry per call, in order. Entries of NCCL calls stay empty.
  std::vector<RankTimes> run() {
    prepare();
    std::vector<RankTimes> times;
    for (const TimedCall& call : case_.calls)
      times.push_back(call.uses_nccl() ? RankTimes{} : run_call(call));
    exchange_.check();
    rank_.barrier();
    return times;
  }

 private:
  static constexpr int kSets = BenchInputs::kSets;

  // The barriers keep allocations apart from kernels of other ranks on the same GPU, which may wait for this
  // thread.
  void prepare() {
    std::vector<std::int32_t> counts;
    for (int set = 0; set < kSets; ++set) counts.push_back(token_count(set, rank_.index()));
    counts_.fill_from(counts.data(), counts_.bytes());
    inputs_on_gpu_.upload(tables_);  // ends with a barrier
    const TimedCall first_call{.work = Work::dispatch, .weighted = true};
    std::int64_t rows = 1;  // at least 1, so that the outputs have an address
    for (int set = 0; set < kSets; ++set) {
      dispatch(first_call, set);
      exchange_.synchronize({.stream = stream_});
      const DispatchResult local = received_on_host_.copy_row_positions(received_, point_.config);
      check_row_positions(inputs_, set, rank_.index(), local, true);
      rank_.barrier();
      inputs_on_gpu_.record_rows(set, local);
      rows = std::max<std::int64_t>(rows, *local.total);
      rank_.barrier();
    }
    if (combines()) inputs_on_gpu_.make_outputs(tables_, rows, stream_);
  }

  bool combines() const {
    return std::any_of(case_.calls.begin(), case_.calls.end(),
                       [](const auto& call) { return call.combines(); });
  }

  RankTimes run_call(const TimedCall& call) {
    RankTimes times;
    const std::int64_t before = wire_bytes();
    times.rows_checked = check(call);
    times.wire_bytes = wire_bytes() - before;
    const auto issue_set = [&](int set) { issue(call, set); };
    if (call.eager) {
      times.seconds = timer_.one_by_one(issue_set);
      times.host_seconds = timer_.on_host(issue_set);
    } else {
      times.seconds = timer_.in_graphs(issue_set);
    }
    return times;
  }

  void issue(const TimedCall& call, int set) {
    if (call.work == Work::metadata) {
      metadata_ = exchange_.metadata(counts_.as<std::int32_t>() + set, {.stream = stream_});
      return;
    }
    if (call.work != Work::combine) dispatch(call, set);
    if (call.work == Work::combine) combine(call, set, inputs_on_gpu_[set].row_weights.as<float>());
    if (call.work == Work::pair) combine(call, set, received_.weight);
  }

  void dispatch(const TimedCall& call, int set_index) {
    const GpuInputSet& set = inputs_on_gpu_[set_index];
    DispatchOptions options{.call = {.stream = stream_, .sm_limit = call.sm_limit}};
    options.memory.plan = set.plan.as<void>();
    options.global_scale = global_scale_.as<float>();
    const Tokens tokens = Tokens::rows(set.tokens.as(), point_.tokens, point_.type);
    const float* weights = call.weighted ? set.weights.as<float>() : nullptr;
    const auto send = [&](const auto& routes) {
      if (!call.in_phases) {
        received_ = exchange_.dispatch(tokens, routes, weights, options);
        return;
      }
      exchange_.dispatch_send(tokens, routes, weights, options);
      received_ = exchange_.dispatch_receive({.stream = stream_});
    };
    if (call.work != Work::dispatch_plan) return send(Ids(set.ids.as<std::int32_t>()));
    options.memory.plan = nullptr;  // this call reads the plan
    send(plan_of(set));
  }

  void combine(const TimedCall& call, int set_index, const float* row_weights) {
    const GpuInputSet& set = inputs_on_gpu_[set_index];
    CombineOptions options{.call = {.stream = stream_, .sm_limit = call.sm_limit}};
    options.reduction = call.reduction;
    if (applies_weights(point_, call)) options.row_weights = row_weights;
    const Outputs outputs{set.outputs.as(), point_.type};
    const Result result{.data = result_.as(), .type = point_.type};
    if (!call.in_phases) return exchange_.combine(outputs, plan_of(set), result, options);
    exchange_.combine_send(outputs, plan_of(set), result, options);
    exchange_.combine_receive({.stream = stream_});
  }

  // Issues the call once with every set, after filling its results with poison. Returns the rows compared.
  std::int64_t check(const TimedCall& call) {
    std::int64_t rows = 0;
    for (int set = 0; set < kSets; ++set) {
      poison(call, set);
      stream_.synchronize();
      // A rank that still copies could wait behind the calls of ranks on its GPU, which wait for it.
      rank_.barrier();
      issue(call, set);
      exchange_.synchronize({.stream = stream_});
      exchange_.check();
      if (call.dispatches() || call.work == Work::pair) rows += check_dispatch(call, set);
      if (call.combines()) rows += check_combine(call, set);
      if (call.work == Work::metadata) rows += check_metadata(set);
    }
    return rows;
  }

  void poison(const TimedCall& call, int set_index) {
    constexpr int kPoison = 0xFF;
    const GpuInputSet& set = inputs_on_gpu_[set_index];
    if (call.work == Work::dispatch || call.work == Work::pair) set.plan.fill(kPoison, stream_);
    if (call.combines()) result_.fill(kPoison, stream_);
    if (call.work == Work::combine || call.work == Work::metadata) return;
    const PartList parts = parts_of(point_.config.format, point_.config.hidden);
    const RowRoom room = row_room(exchange_.config(), exchange_.rank().index());
    for (int p = 0; p < parts.count; ++p) {
      const auto bytes = static_cast<std::size_t>(part_bytes_total(parts.part[p], room));
      void* data = received_.parts[static_cast<std::size_t>(p)].data;
      cuda::check(cudaMemsetAsync(data, kPoison, bytes, stream_.get()), "fill device memory");
    }
  }

  std::int64_t check_dispatch(const TimedCall& call, int set) {
    const DispatchResult local = received_on_host_.copy_row_positions(received_, point_.config);
    const std::int64_t rows = check_row_positions(inputs_, set, rank_.index(), local, call.weighted);
    inputs_on_gpu_.check_bytes(set, received_, stream_);
    return rows;
  }

  std::int64_t check_combine(const TimedCall& call, int set) {
    copy_to_host(result_copy_.data(), result_.as(), result_.bytes());
    return check_result(point_, inputs_, set, rank_.index(), result_copy_.data(),
                        {.reduction = call.reduction, .weighted = applies_weights(point_, call)});
  }

  std::int64_t check_metadata(int set) {
    StepMetadata got, expected;
    copy_to_host(&got, metadata_, sizeof got);
    for (int rank = 0; rank < point_.ranks; ++rank) {
      const std::int32_t count = token_count(set, rank);
      expected.sum += count;
      if (rank < rank_.index()) expected.prefix += count;
      expected.maximum = std::max(expected.maximum, count);
    }
    if (got.sum == expected.sum && got.prefix == expected.prefix && got.maximum == expected.maximum) return 1;
    throw CheckFailed(
        fmt::format("check failed: set {}, rank {}: sum, prefix and maximum of the counts are {}, {}, {}, "
                    "expected {}, {}, "
                    "{}",
                    set, rank_.index(), got.sum, got.prefix, got.maximum, expected.sum, expected.prefix,
                    expected.maximum));
  }

  std::int64_t wire_bytes() const {
    const WireCounts wire = exchange_.wire_counts();
    return wire.dispatch_bytes + wire.combine_bytes;
  }

  Rank rank_;
  const GpuCase& case_;
  const BenchPoint& point_;
  const BenchInputs& inputs_;
  TokenTables& tables_;
  Exchange exchange_;
  RankStream stream_;
  GpuBuffer global_scale_;  // empty: g is 1
  GpuTimer timer_;
  GpuInputs inputs_on_gpu_;
  GpuBuffer result_;
  GpuBuffer counts_;  // token counts for Work::metadata, by set
  std::vector<std::byte> result_copy_;
  ResultOnHost received_on_host_;
  DispatchResult received_;  // of the last dispatch
  const StepMetadata* metadata_ = nullptr;
};

using TimesOfRanks = std::vector<std::vector<RankTimes>>;  // indexed by rank, then call

TimesOfRanks run_exchange(const GpuCase& gpu_case, const BenchInputs& inputs) {
  const BenchPoint& point = gpu_case.point;
  TokenTables tables(point);
  TimesOfRanks times(static_cast<std::size_t>(point.ranks));
  Group group = Group::threads(point.ranks, point.hosts);
  group.set_deadline(point.config.deadline);
  group.run([&](const Rank& rank) {
    use_gpu_of_rank(rank.index());
    times[static_cast<std::size_t>(rank.index())] = GpuBenchRunner(rank, gpu_case, inputs, tables).run();
  });
  return times;
}

GpuTimes times_of_call(const TimesOfRanks& ranks, std::size_t call) {
  GpuTimes times;
  std::vector<std::vector<double>> seconds;
  for (const std::vector<RankTimes>& rank : ranks) {
    const RankTimes& own = rank[call];
    seconds.push_back(own.seconds);
    times.host_seconds = std::max(times.host_seconds, own.host_seconds);
    times.wire_bytes += static_cast<double>(own.wire_bytes);
    times.rows_checked += own.rows_checked;
  }

  times.seconds = times_of(slowest(seconds));
  times.wire_bytes /= static_cast<double>(ranks.size()) * BenchInputs::kSets;
  return times;
}

}  // namespace

std::vector<GpuBenchRow> run_gpu_case(const GpuCase& gpu_case, const std::string& nccl) {
  const BenchInputs inputs(gpu_case.point);
  const RemoteRows busiest = busiest_remote_rows(gpu_case.point, inputs);
  const auto uses_nccl = [](const TimedCall& call) { return call.uses_nccl(); };
  TimesOfRanks times;
  if (!std::all_of(gpu_case.calls.begin(), gpu_case.calls.end(), uses_nccl))
    times = run_exchange(gpu_case, inputs);
  std::vector<GpuBenchRow> rows;
  for (std::size_t i = 0; i < gpu_case.calls.size(); ++i) {
    const TimedCall& call = gpu_case.calls[i];
    GpuBenchRow row{gpu_case.point, routing_of(gpu_case.point, inputs), call, {}};
    if (call.uses_nccl()) row.point = without_quantisation(gpu_case.point);
    row.times = call.uses_nccl() ? run_nccl_baseline(row.point, call.work, nccl) : times_of_call(times, i);
    row.times.lower_bound_bytes = lower_bound_bytes(row.point, call, busiest);
    rows.push_back(row);
  }

  return rows;
}

}  // namespace ferry::app
