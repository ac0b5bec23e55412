#include "tools/ferry/bench/gpu_runner.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "tools/ferry/bench/check.hpp"
#include "tools/ferry/commands/commands.hpp"

namespace ferry::app {

namespace {

std::int64_t result_bytes(const BenchPoint& point) {
  const bool apart = point.config.reduction == Reduction::unreduced;
  return point.tokens * point.token_bytes() * (apart ? point.config.top_k : 1);
}

// Of all groups together.
std::int64_t rows_of(const Exchange& exchange) {
  const Config& config = exchange.config();
  const bool padded = config.layout == Layout::expert_padded;
  return exchange.capacity() * (padded ? config.placement.local_experts(exchange.rank().index()) : 1);
}

bool weighs_rows(const BenchPoint& point, const GpuWork& work) {
  return work.weighted && point.config.layout != Layout::rank_major && work.reduction != Reduction::unreduced;
}

Plan plan_of(const GpuInputSet& set) {
  return Plan::over(set.plan.as<void>(), static_cast<std::size_t>(set.plan.bytes()));
}

// Of a step that is a set: different on every rank and in every set.
std::int32_t count_of(int set, int rank) {
  return 1000 * (set + 1) + 7 * rank * rank;
}

}  // namespace

GpuBenchRunner::GpuBenchRunner(const Rank& rank, const GpuCase& of, const BenchInputs& inputs,
                           TokenTables& tables)
    : rank_(rank),
      case_(of),
      point_(of.point),
      inputs_(inputs),
      tables_(tables),
      exchange_(rank, point_.config),
      timer_(rank, point_, stream_, [this] { exchange_.synchronize(0, stream_); }),
      sets_(rank, point_, inputs),
      result_(result_bytes(point_)),
      counts_(kSets * 4),
      result_on_host_(static_cast<std::size_t>(result_.bytes())) {}

std::vector<RankTimes> GpuBenchRunner::play() {
  prepare();
  std::vector<RankTimes> notes;
  for (const GpuWork& work : case_.works) notes.push_back(work.of_nccl() ? RankTimes{} : play(work));
  exchange_.check();
  rank_.barrier();
  return notes;
}

bool GpuBenchRunner::combines() const {
  return std::any_of(case_.works.begin(), case_.works.end(),
                     [](const auto& work) { return work.combines(); });
}

// Ranks meet before anybody allocates: on a shared card kernels may wait for this thread.
void GpuBenchRunner::prepare() {
  sets_.bring(tables_);
  std::vector<std::int32_t> counts;
  for (int set = 0; set < kSets; ++set) counts.push_back(count_of(set, rank_.index()));
  counts_.fill_from(counts.data(), counts_.bytes());
  const GpuWork kept{.work = Work::dispatch, .weighted = true};
  std::int64_t rows = 1;  // an address, also without rows
  for (int set = 0; set < kSets; ++set) {
    dispatch(kept, set);
    exchange_.synchronize(0, stream_);
    const DispatchResult local = result_on_host_.copy_row_positions(received_, point_.config);
    check_row_positions(point_, inputs_, set, rank_.index(), local, true);
    rank_.barrier();
    sets_.record_rows(set, local);
    rows = std::max<std::int64_t>(rows, *local.total);
    rank_.barrier();
  }
  if (combines()) sets_.make_outputs(tables_, rows, stream_);
}

RankTimes GpuBenchRunner::play(const GpuWork& work) {
  RankTimes notes;
  const std::int64_t before = wire_bytes();
  notes.rows_checked = check(work);
  notes.wire_bytes = wire_bytes() - before;
  const auto one = [&](int set) { call(work, set); };
  if (work.eager) {
    notes.seconds = timer_.one_by_one(one);
    notes.host_seconds = timer_.on_host(one);
  } else {
    notes.seconds = timer_.in_graphs(one);
  }
  return notes;
}

std::int64_t GpuBenchRunner::wire_bytes() const {
  const WireCounts wire = exchange_.wire_counts();
  return wire.dispatch_bytes + wire.combine_bytes;
}

void GpuBenchRunner::call(const GpuWork& work, int set) {
  if (work.work == Work::metadata) {
    metadata_ = exchange_.metadata(counts_.as<std::int32_t>() + set, 0, stream_);
    return;
  }
  if (work.work != Work::combine) dispatch(work, set);
  if (work.work == Work::combine) combine(work, set, sets_[set].row_weights.as<float>());
  if (work.work == Work::pair) combine(work, set, received_.weight);
}

void GpuBenchRunner::dispatch(const GpuWork& work, int number) {
  const GpuInputSet& set = sets_[number];
  DispatchOptions options;
  options.sm_limit = work.sm_limit;
  options.memory.plan = set.plan.as<void>();
  const Tokens tokens = Tokens::rows(set.tokens.as(), point_.tokens, point_.type);
  const float* weights = work.weighted ? set.weights.as<float>() : nullptr;
  const auto send = [&](const auto& routes) {
    if (!work.in_phases) {
      received_ = exchange_.dispatch(tokens, routes, weights, options, stream_);
      return;
    }
    exchange_.dispatch_send(tokens, routes, weights, options, stream_);
    received_ = exchange_.dispatch_receive(0, stream_);
  };
  if (work.work != Work::dispatch_plan) return send(Ids(set.ids.as<std::int32_t>()));
  options.memory.plan = nullptr;  // the plan is given
  send(plan_of(set));
}

void GpuBenchRunner::combine(const GpuWork& work, int number, const float* row_weights) {
  const GpuInputSet& set = sets_[number];
  CombineOptions options;
  options.sm_limit = work.sm_limit;
  options.reduction = work.reduction;
  if (weighs_rows(point_, work)) options.row_weights = row_weights;
  const Outputs outputs{set.outputs.as(), point_.type};
  const Result result{.data = result_.as(), .type = point_.type};
  if (!work.in_phases) return exchange_.combine(outputs, plan_of(set), result, options, stream_);
  exchange_.combine_send(outputs, plan_of(set), result, options, stream_);
  exchange_.combine_receive(0, stream_);
}

std::int64_t GpuBenchRunner::check(const GpuWork& work) {
  std::int64_t rows = 0;
  for (int set = 0; set < kSets; ++set) {
    poison(work, set);
    call(work, set);
    exchange_.synchronize(0, stream_);
    exchange_.check();
    if (work.dispatches() || work.work == Work::pair) rows += check_dispatch(work, set);
    if (work.combines()) rows += check_combine(work, set);
    if (work.work == Work::metadata) rows += check_metadata(set);
  }
  return rows;
}

void GpuBenchRunner::poison(const GpuWork& work, int number) {
  constexpr int kPoison = 0xFF;
  const GpuInputSet& set = sets_[number];
  if (work.work == Work::dispatch || work.work == Work::pair) set.plan.fill(kPoison, stream_);
  if (work.combines()) result_.fill(kPoison, stream_);
  if (work.work == Work::combine || work.work == Work::metadata) return;
  const PartList parts = parts_of(point_.config.format, point_.config.hidden);
  for (int p = 0; p < parts.count; ++p) {
    const auto bytes = static_cast<std::size_t>(part_bytes_total(parts.part[p], rows_of(exchange_)));
    void* data = received_.parts[static_cast<std::size_t>(p)].data;
    cuda::check(cudaMemsetAsync(data, kPoison, bytes, stream_.get()), "fill device memory");
  }
}

std::int64_t GpuBenchRunner::check_dispatch(const GpuWork& work, int set) {
  const DispatchResult local = result_on_host_.copy_row_positions(received_, point_.config);
  const std::int64_t rows = check_row_positions(point_, inputs_, set, rank_.index(), local, work.weighted);
  sets_.check_bytes(set, received_, stream_);
  return rows;
}

std::int64_t GpuBenchRunner::check_combine(const GpuWork& work, int set) {
  copy_to_host(result_on_host_.data(), result_.as(), result_.bytes());
  return check_result(point_, inputs_, set, rank_.index(), result_on_host_.data(),
                      {.reduction = work.reduction, .weighted = weighs_rows(point_, work)});
}

std::int64_t GpuBenchRunner::check_metadata(int set) {
  StepMetadata got, expected;
  copy_to_host(&got, metadata_, sizeof got);
  for (int rank = 0; rank < point_.ranks; ++rank) {
    const std::int32_t count = count_of(set, rank);
    expected.sum += count;
    if (rank < rank_.index()) expected.prefix += count;
    expected.maximum = std::max(expected.maximum, count);
  }
  if (got.sum == expected.sum && got.prefix == expected.prefix && got.maximum == expected.maximum) return 1;
  throw CheckFailed(fmt::format("check failed: set {}, rank {}: counts are {}, {}, {} instead of {}, {}, {}",
                                set, rank_.index(), got.sum, got.prefix, got.maximum, expected.sum,
                                expected.prefix, expected.maximum));
}

}  // namespace ferry::app
