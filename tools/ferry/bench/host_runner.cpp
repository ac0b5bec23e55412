#include "tools/ferry/bench/host_runner.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "format/parts.hpp"
#include "memory/mapping.hpp"
#include "tools/ferry/bench/check.hpp"
#include "tools/ferry/common/machine.hpp"

namespace ferry::app {

namespace {

constexpr int kSets = BenchInputs::kSets;
constexpr std::int64_t kLeastCopied = 256LL << 20;  // bytes of all ranks' buffers together
constexpr int kCopies = 10;                         // at most so many repetitions also time a memcpy

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::int64_t rows_of(const Config& config, std::int64_t capacity, int rank) {
  return config.layout == Layout::expert_padded ? capacity * config.placement.local_experts(rank) : capacity;
}

std::int64_t copied_bytes(int ranks) {
  return std::max(kLeastCopied, 4 * cache_bytes()) / 2 / ranks;
}

bool times_memcpy(const BenchPoint& point, int repetition) {
  return repetition % std::max(1, point.repetitions / kCopies) == 0;
}

}  // namespace

HostBenchRunner::HostBenchRunner(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs, Span* spans,
                         RankCounts& notes)
    : rank_(rank),
      point_(point),
      inputs_(inputs),
      spans_(spans),
      notes_(notes),
      exchange_(rank, point.config),
      result_(point.tokens * point.token_bytes() *
              (point.config.reduction == Reduction::unreduced ? point.config.top_k : 1)),
      copy_from_(copied_bytes(point.ranks)),
      copy_to_(copied_bytes(point.ranks)) {
  const int me = rank.index();
  for (std::size_t set = 0; set < kSets; ++set) {
    tokens_[set] = LocalMemory(point.tokens * point.token_bytes());
    for (std::int64_t token = 0; token < point.tokens; ++token) {
      inputs.write_token(static_cast<int>(set), me, token, 1.0f,
                         tokens_[set].data() + token * point.token_bytes());
    }
  }
  if (point.config.format.kind == FormatKind::fp8_e4m3) {
    own_outputs_ = LocalMemory(rows_of(point.config, exchange_.capacity(), me) * point.token_bytes());
  }
  std::memset(copy_from_.data(), 1, static_cast<std::size_t>(copy_from_.bytes()));
  std::memset(copy_to_.data(), 2, static_cast<std::size_t>(copy_to_.bytes()));
}

void HostBenchRunner::play() {
  for (int set = 0; set < kSets; ++set) check(set);
  const WireCounts wire = exchange_.wire_counts();
  notes_.dispatch_wire_bytes = wire.dispatch_bytes;
  notes_.combine_wire_bytes = wire.combine_bytes;
  for (int repetition = 0; repetition < point_.repetitions; ++repetition) time(repetition);
}

DispatchResult HostBenchRunner::dispatch(int set) {
  return exchange_.dispatch(
      Tokens::rows(tokens_[static_cast<std::size_t>(set)].data(), point_.tokens, point_.type),
      inputs_.ids(set, rank_.index()), inputs_.weights(set, rank_.index()));
}

void HostBenchRunner::combine(int set) {
  const auto s = static_cast<std::size_t>(set);
  CombineOptions options;
  const bool weighs =
      point_.config.layout != Layout::rank_major && point_.config.reduction != Reduction::unreduced;
  if (weighs) options.row_weights = reinterpret_cast<const float*>(row_weights_[s].data());
  exchange_.combine(outputs_, plans_[s], {.data = result_.data(), .type = point_.type}, options);
}

// HostExperts that leave rows as they are: what arrived goes back.
void HostBenchRunner::check(int set) {
  const auto s = static_cast<std::size_t>(set);
  const DispatchResult received = dispatch(set);
  notes_.rows_checked += check_received(point_, inputs_, set, rank_.index(), received);
  notes_.rows += std::accumulate(received.counts, received.counts + received.groups, std::int64_t{0});
  plans_[s] = received.plan.copy();
  if (point_.config.layout != Layout::rank_major) {
    row_weights_[s] = LocalMemory(*received.total * 4);
    std::memcpy(row_weights_[s].data(), received.weight, static_cast<std::size_t>(*received.total) * 4);
  }
  outputs_ = {.data = received.data, .type = point_.type};
  if (own_outputs_.bytes() > 0) fill_outputs(received, set);
  std::memset(result_.data(), 0xFF, static_cast<std::size_t>(result_.bytes()));
  combine(set);
  notes_.rows_checked += check_result(point_, inputs_, set, rank_.index(), result_.data(),
                                      {.reduction = point_.config.reduction});
}

void HostBenchRunner::fill_outputs(const DispatchResult& received, int set) {
  for (int group = 0; group < received.groups; ++group) {
    for (std::int32_t i = 0; i < received.counts[group]; ++i) {
      const std::int64_t row = received.row_offsets[group] + i;
      inputs_.write_token(set, received.source[row].rank, received.source[row].token, 1.0f,
                          own_outputs_.data() + row * point_.token_bytes());
    }
  }
  outputs_.data = own_outputs_.data();
}

void HostBenchRunner::time(int repetition) {
  Span* const spans = spans_ + std::int64_t{repetition} * kTimed;
  auto set_of = [&](int launch) { return (repetition * point_.launches + launch) % kSets; };
  if (times_memcpy(point_, repetition)) {
    time_one(spans[kMemcpy], [&] {
      std::memcpy(copy_to_.data(), copy_from_.data(), static_cast<std::size_t>(copy_to_.bytes()));
    });
    // The copy has emptied the caches of small calls' data.
    if (point_.launches > 1) {
      dispatch(0);
      combine(0);
    }
  }
  time_one(spans[kDispatch], [&] {
    for (int launch = 0; launch < point_.launches; ++launch) dispatch(set_of(launch));
  });
  time_one(spans[kCombine], [&] {
    for (int launch = 0; launch < point_.launches; ++launch) combine(set_of(launch));
  });
}

void HostBenchRunner::time_one(Span& span, const std::function<void()>& work) {
  rank_.barrier();
  span.begin = now();
  work();
  span.end = now();
}

namespace {

// What the ranks left, in memory that threads and forked processes share.
class SharedMeasurements {
 public:
  explicit SharedMeasurements(const BenchPoint& point)
      : point_(point),
        notes_(Mapping::anonymous_shared(point.ranks * static_cast<std::int64_t>(sizeof(RankCounts)))),
        spans_(Mapping::anonymous_shared(point.ranks * spans_of_rank() *
                                         static_cast<std::int64_t>(sizeof(Span)))) {}

  RankCounts& notes(int rank) const { return reinterpret_cast<RankCounts*>(notes_.data())[rank]; }
  Span* spans(int rank) const { return reinterpret_cast<Span*>(spans_.data()) + rank * spans_of_rank(); }

  // Seconds of every repetition, of all ranks: what one rank was late with is not hidden by another.
  std::vector<double> seconds(HostBenchRunner::Timed timed) const {
    std::vector<double> all;
    for (int repetition = 0; repetition < point_.repetitions; ++repetition) {
      if (timed == HostBenchRunner::kMemcpy && !times_memcpy(point_, repetition)) continue;
      double begin = 0, end = 0;
      for (int rank = 0; rank < point_.ranks; ++rank) {
        const Span& span = spans(rank)[std::int64_t{repetition} * HostBenchRunner::kTimed + timed];
        begin = rank == 0 ? span.begin : std::min(begin, span.begin);
        end = std::max(end, span.end);
      }
      all.push_back(end - begin);
    }
    return all;
  }

  double sum(std::int64_t RankCounts::* what) const {
    double total = 0;
    for (int rank = 0; rank < point_.ranks; ++rank) total += static_cast<double>(notes(rank).*what);
    return total;
  }

 private:
  std::int64_t spans_of_rank() const { return std::int64_t{point_.repetitions} * HostBenchRunner::kTimed; }

  const BenchPoint& point_;
  Mapping notes_, spans_;
};

BenchTimes times_of_calls(std::vector<double> seconds, int launches) {
  for (double& one : seconds) one /= launches;
  return times_of(seconds);
}

// Bytes of arrived rows, scales included.
double arrived_bytes(const BenchPoint& point, double rows) {
  const PartList parts = parts_of(point.config.format, point.config.hidden);
  double bytes = 0;
  for (int p = 0; p < parts.count; ++p) bytes += static_cast<double>(parts.part[p].row_bytes);
  return rows * bytes;
}

BenchResult result_of(const BenchPoint& point, const BenchInputs& inputs, const SharedMeasurements& book) {
  BenchResult result;
  result.routing = inputs.routing();
  result.rows = book.sum(&RankCounts::rows) / kSets;
  result.rows_checked = static_cast<std::int64_t>(book.sum(&RankCounts::rows_checked));
  const double tokens =
      static_cast<double>(point.ranks) * point.tokens * static_cast<double>(point.token_bytes());
  const double results = tokens * (point.config.reduction == Reduction::unreduced ? point.config.top_k : 1);
  BenchOperation& dispatch = result.dispatch;
  dispatch.seconds = times_of_calls(book.seconds(HostBenchRunner::kDispatch), point.launches);
  dispatch.wire_bytes = book.sum(&RankCounts::dispatch_wire_bytes) / kSets;
  dispatch.moved_bytes = tokens + 2 * dispatch.wire_bytes + arrived_bytes(point, result.rows);
  BenchOperation& combine = result.combine;
  combine.seconds = times_of_calls(book.seconds(HostBenchRunner::kCombine), point.launches);
  combine.wire_bytes = book.sum(&RankCounts::combine_wire_bytes) / kSets;
  combine.moved_bytes =
      result.rows * static_cast<double>(point.token_bytes()) + 2 * combine.wire_bytes + results;
  result.memcpy_bytes_per_second = 2.0 * static_cast<double>(copied_bytes(point.ranks)) * point.ranks /
                                   percentile(book.seconds(HostBenchRunner::kMemcpy), 0.5);
  return result;
}

}  // namespace

BenchResult run_host_bench(const BenchPoint& point) {
  const BenchInputs inputs(point);
  const SharedMeasurements book(point);
  Group group = point.processes ? Group::processes(point.ranks) : Group::threads(point.ranks);
  group.set_deadline(point.config.deadline);
  group.run([&](const Rank& rank) {
    HostBenchRunner(rank, point, inputs, book.spans(rank.index()), book.notes(rank.index())).play();
  });
  return result_of(point, inputs, book);
}

}  // namespace ferry::app
