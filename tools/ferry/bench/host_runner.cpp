#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>

#include <fmt/format.h>

#include "base/mapping.hpp"
#include "ferry/exchange.hpp"
#include "ferry/group.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/bench/runners.hpp"
#include "tools/ferry/bench/traffic.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

constexpr int kSets = BenchInputs::kSets;

// The calls that every repetition times.
enum Timed : int { kDispatch, kCombine, kTimed };

// When a rank began and ended something, in seconds of the steady clock, which all processes share.
struct Span {
  double begin = 0, end = 0;
};

// Counts of one rank in one pass over the input sets.
struct RankCounts {
  std::int64_t dispatch_wire_bytes, combine_wire_bytes, rows, rows_checked;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Checks and times one rank's calls.
class HostBenchRunner {
 public:
  // `spans` [repetitions][kTimed] and `counts` are this rank's, in memory shared with the parent process.
  HostBenchRunner(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs, Span* spans,
                  RankCounts& counts)
      : rank_(rank),
        point_(point),
        inputs_(inputs),
        spans_(spans),
        counts_(counts),
        exchange_(rank, point.config),
        result_(point.result_bytes()) {
    for (std::size_t set = 0; set < kSets; ++set) {
      tokens_[set] = LocalMemory(point.tokens * point.token_bytes());
      for (std::int64_t token = 0; token < point.tokens; ++token) {
        inputs.write_token(static_cast<int>(set), rank.index(), token, 1.0f,
                           tokens_[set].data() + token * point.token_bytes());
      }
    }
    if (point.config.format.quantises())
      decoded_outputs_ = LocalMemory(received_row_capacity(exchange_) * point.token_bytes());
  }

  void run() {
    for (int set = 0; set < kSets; ++set) check(set);
    const WireCounts wire = exchange_.wire_counts();
    counts_.dispatch_wire_bytes = wire.dispatch_bytes;
    counts_.combine_wire_bytes = wire.combine_bytes;
    for (int repetition = 0; repetition < point_.repetitions; ++repetition) time(repetition);
  }

 private:
  // The experts return the received rows unchanged.
  void check(int set) {
    const auto s = static_cast<std::size_t>(set);
    const DispatchResult received = dispatch(set);
    counts_.rows_checked += check_received(point_, inputs_, set, rank_.index(), received);
    counts_.rows += std::accumulate(received.counts, received.counts + received.groups, std::int64_t{0});
    plans_[s] = received.plan.copy();
    if (point_.config.layout != Layout::rank_major) {
      row_weights_[s] = LocalMemory(*received.total * 4);
      std::memcpy(row_weights_[s].data(), received.weight, static_cast<std::size_t>(*received.total) * 4);
    }
    outputs_ = {.data = received.data, .type = point_.type};
    if (decoded_outputs_.bytes() > 0) write_outputs(received, set);
    std::memset(result_.data(), 0xFF, static_cast<std::size_t>(result_.bytes()));
    combine(set);
    counts_.rows_checked += check_result(point_, inputs_, set, rank_.index(), result_.data(),
                                         {.reduction = point_.config.reduction});
  }

  void write_outputs(const DispatchResult& received, int set) {
    for (int group = 0; group < received.groups; ++group) {
      for (std::int32_t i = 0; i < received.counts[group]; ++i) {
        const std::int64_t row = received.row_offsets[group] + i;
        inputs_.write_token(set, received.source[row].rank, received.source[row].token, 1.0f,
                            decoded_outputs_.data() + row * point_.token_bytes());
      }
    }
    outputs_.data = decoded_outputs_.data();
  }

  DispatchResult dispatch(int set) {
    return exchange_.dispatch(
        Tokens::rows(tokens_[static_cast<std::size_t>(set)].data(), point_.tokens, point_.type),
        inputs_.ids(set, rank_.index()), inputs_.weights(set, rank_.index()),
        {.global_scale = point_.global_scale == 1 ? nullptr : &point_.global_scale});
  }

  void combine(int set) {
    const auto s = static_cast<std::size_t>(set);
    CombineOptions options;
    if (combine_applies_weights(point_.config.layout, point_.config.reduction))
      options.row_weights = reinterpret_cast<const float*>(row_weights_[s].data());
    exchange_.combine(outputs_, plans_[s], {.data = result_.data(), .type = point_.type}, options);
  }

  void time(int repetition) {
    Span* const spans = spans_ + std::int64_t{repetition} * kTimed;
    auto set_of = [&](int launch) { return (repetition * point_.launches + launch) % kSets; };
    time_calls(spans[kDispatch], [&] {
      for (int launch = 0; launch < point_.launches; ++launch) dispatch(set_of(launch));
    });
    time_calls(spans[kCombine], [&] {
      for (int launch = 0; launch < point_.launches; ++launch) combine(set_of(launch));
    });
  }

  void time_calls(Span& span, const std::function<void()>& calls) {
    rank_.barrier();
    span.begin = now();
    calls();
    span.end = now();
  }

  Rank rank_;
  const BenchPoint& point_;
  const BenchInputs& inputs_;
  Span* spans_;
  RankCounts& counts_;
  Exchange exchange_;
  std::array<LocalMemory, kSets> tokens_;
  std::array<Plan, kSets> plans_;
  std::array<LocalMemory, kSets> row_weights_;
  LocalMemory result_;
  LocalMemory
      decoded_outputs_;  // fp8 only: the experts' rows, which have another type than the received rows
  Outputs outputs_;
};

// The spans and counts of all ranks, in memory that threads and forked processes share.
class SharedMeasurements {
 public:
  explicit SharedMeasurements(const BenchPoint& point)
      : point_(point),
        counts_(Mapping::anonymous_shared(point.ranks * static_cast<std::int64_t>(sizeof(RankCounts)))),
        spans_(Mapping::anonymous_shared(point.ranks * spans_per_rank() *
                                         static_cast<std::int64_t>(sizeof(Span)))) {}

  // Collective. For ranks that share no memory: every rank gets the measurements of all.
  void gather(const Rank& rank) {
    gather_into(rank, counts_, sizeof(RankCounts));
    gather_into(rank, spans_, static_cast<std::size_t>(spans_per_rank()) * sizeof(Span));
  }

  RankCounts& counts(int rank) const { return reinterpret_cast<RankCounts*>(counts_.data())[rank]; }
  Span* spans(int rank) const { return reinterpret_cast<Span*>(spans_.data()) + rank * spans_per_rank(); }

  // Seconds of a call by repetition, from the first rank's begin to the last rank's end, so that a rank that
  // starts early does not hide the delay of another.
  std::vector<double> seconds(Timed timed) const {
    std::vector<double> all;
    for (int repetition = 0; repetition < point_.repetitions; ++repetition) {
      double begin = 0, end = 0;
      for (int rank = 0; rank < point_.ranks; ++rank) {
        const Span& span = spans(rank)[std::int64_t{repetition} * kTimed + timed];
        begin = rank == 0 ? span.begin : std::min(begin, span.begin);
        end = std::max(end, span.end);
      }
      all.push_back((end - begin) / point_.launches);
    }
    return all;
  }

  double sum(std::int64_t RankCounts::* member) const {
    double total = 0;
    for (int rank = 0; rank < point_.ranks; ++rank) total += static_cast<double>(counts(rank).*member);
    return total;
  }

 private:
  static void gather_into(const Rank& rank, const Mapping& all, std::size_t bytes) {
    const std::byte* mine = all.data() + static_cast<std::size_t>(rank.index()) * bytes;
    const std::vector<std::byte> copy(mine, mine + bytes);
    rank.all_gather(copy.data(), all.data(), bytes);
  }

  std::int64_t spans_per_rank() const { return std::int64_t{point_.repetitions} * kTimed; }

  const BenchPoint& point_;
  Mapping counts_, spans_;
};

}  // namespace

HostBenchRow run_host_point(const BenchPoint& point) {
  const BenchInputs inputs(point);
  SharedMeasurements measured(point);
  const bool on_mpi = point.config.backend == BackendKind::collective;
  const LocalGroup local{.ranks = point.ranks, .hosts = point.hosts, .processes = point.processes};
  if (on_mpi) refuse_local_options(local);
  Group group = on_mpi ? mpi_group(point.ranks) : local_group(local);
  group.set_deadline(point.config.deadline);
  HostBenchRow row;
  if (!on_mpi) row.memcpy_before = memcpy_bytes_per_second(point.ranks).median;
  group.run([&](const Rank& rank) {
    HostBenchRunner(rank, point, inputs, measured.spans(rank.index()), measured.counts(rank.index())).run();
    if (!on_mpi) return;
    measured.gather(rank);
    row.rank = rank.index();
  });

  row.point = point;
  row.routing = routing_of(point, inputs);
  row.rows = measured.sum(&RankCounts::rows) / kSets;
  row.rows_checked = static_cast<std::int64_t>(measured.sum(&RankCounts::rows_checked));
  const double tokens =
      static_cast<double>(point.ranks) * point.tokens * static_cast<double>(point.token_bytes());
  const double results = static_cast<double>(point.ranks) * static_cast<double>(point.result_bytes());
  row.dispatch.seconds = times_of(measured.seconds(kDispatch));
  row.dispatch.wire_bytes = measured.sum(&RankCounts::dispatch_wire_bytes) / kSets;
  row.dispatch.moved_bytes =
      tokens + 2 * row.dispatch.wire_bytes + row.rows * static_cast<double>(received_row_bytes(point.config));
  row.combine.seconds = times_of(measured.seconds(kCombine));
  row.combine.wire_bytes = measured.sum(&RankCounts::combine_wire_bytes) / kSets;
  row.combine.moved_bytes =
      row.rows * static_cast<double>(point.token_bytes()) + 2 * row.combine.wire_bytes + results;
  if (row.rank == 0) row.memcpy_after = memcpy_bytes_per_second(point.ranks).median;
  if (on_mpi) row.memcpy_before = row.memcpy_after;  // one rank measures, and which was not known before
  return row;
}

}  // namespace ferry::app
