#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/trace.hpp"

namespace ferry {
namespace {

std::int64_t checked_sum(std::span<const std::int64_t> counts) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] < 0) {
      throw UsageError(str("load statistics: expected counts of 0 or more, found ", counts[i], " at ", i));
    }
    sum += counts[i];
  }
  if (sum == 0) {
    throw UsageError(
        str("load statistics: expected at least one route, found none in ", counts.size(), " counts"));
  }
  return sum;
}

double percentile(const std::vector<double>& ascending, std::size_t percent) {
  return ascending[(percent * (ascending.size() - 1) + 50) / 100];
}

// `loads` are in ascending order.
double sigma_ln(const std::vector<double>& loads) {
  std::vector<double> logs;
  for (const double load : loads) {
    if (load > 0) logs.push_back(std::log(load));
  }
  const auto n = static_cast<double>(logs.size());
  const double mean = std::accumulate(logs.begin(), logs.end(), 0.0) / n;
  double squares = 0;
  for (const double value : logs) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / n);
}

// `loads` are in ascending order and have a mean of 1.
double gini(const std::vector<double>& loads) {
  const auto n = static_cast<double>(loads.size());
  double sum = 0;
  for (std::size_t i = 0; i < loads.size(); ++i)
    sum += (2.0 * static_cast<double>(i + 1) - n - 1.0) * loads[i];
  return sum / (n * n);
}

double middle(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

using TokenIds = std::span<const std::int32_t>;

TokenIds token_ids(TokenIds layer, std::int64_t token, int top_k) {
  const auto k = static_cast<std::size_t>(top_k);
  return layer.subspan(static_cast<std::size_t>(token) * k, k);
}

// Number of distinct experts in both `a` and `b`.
int shared_experts(TokenIds a, TokenIds b) {
  int shared = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const bool counted = std::find(b.begin(), b.begin() + static_cast<std::ptrdiff_t>(i), b[i]) !=
                         b.begin() + static_cast<std::ptrdiff_t>(i);
    if (b[i] >= 0 && !counted && std::find(a.begin(), a.end(), b[i]) != a.end()) ++shared;
  }
  return shared;
}

// How a trace is dispatched: see partition().
class Blocks {
 public:
  // `tokens_per_rank` 0: all tokens in one step.
  Blocks(const Trace& trace, const Placement& placement, std::int64_t tokens_per_rank)
      : ranks_(placement.ranks()),
        tokens_(tokens_per_rank > 0 ? tokens_per_rank
                                    : std::max<std::int64_t>(1, (trace.tokens + ranks_ - 1) / ranks_)) {}

  RouteOrigin origin(std::int64_t token, std::size_t slot) const {
    return {.token = static_cast<int>(token % tokens_),
            .source = static_cast<int>(token / tokens_ % ranks_),
            .slot = static_cast<int>(slot)};
  }

 private:
  int ranks_;
  std::int64_t tokens_;
};

void require_experts(const Placement& placement, std::size_t experts) {
  if (static_cast<std::size_t>(placement.experts()) == experts) return;
  throw UsageError(str("statistics: expected a placement of ", counted(experts, "expert"), ", found one of ",
                       placement.experts()));
}

}  // namespace

std::vector<std::int64_t> expert_counts(const Trace& trace, int layer) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(trace.experts));
  for (const std::int32_t id : trace.layer_ids(layer)) {
    if (id >= 0) ++counts[static_cast<std::size_t>(id)];
  }
  return counts;
}

std::vector<std::int64_t> rank_counts(std::span<const std::int64_t> counts, const Placement& placement) {
  require_experts(placement, counts.size());
  if (placement.has_replicas()) {
    throw UsageError(
        "rank_counts: the placement has replicas, and counts do not say which one a route takes: pass the "
        "trace");
  }
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(placement.ranks()));
  for (std::size_t e = 0; e < counts.size(); ++e) {
    ranks[static_cast<std::size_t>(placement.location(static_cast<int>(e)).rank)] += counts[e];
  }
  return ranks;
}

std::vector<std::int64_t> rank_counts(const Trace& trace, int layer, const Placement& placement,
                                      std::int64_t tokens_per_rank) {
  require_experts(placement, static_cast<std::size_t>(trace.experts));
  if (tokens_per_rank < 0)
    throw UsageError(str("rank_counts: tokens_per_rank = ", tokens_per_rank, ", must be 0 or more"));
  const Blocks blocks(trace, placement, tokens_per_rank);
  const TokenIds ids = trace.layer_ids(layer);
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(placement.ranks()));
  for (std::int64_t token = 0; token < trace.tokens; ++token) {
    const TokenIds of_token = token_ids(ids, token, trace.top_k);
    for (std::size_t slot = 0; slot < of_token.size(); ++slot) {
      if (of_token[slot] < 0) continue;
      const int rank = placement.location(of_token[slot], blocks.origin(token, slot)).rank;
      ++ranks[static_cast<std::size_t>(rank)];
    }
  }
  return ranks;
}

LoadStatistics load_statistics(std::span<const std::int64_t> counts) {
  const std::int64_t routes = checked_sum(counts);
  const double mean = static_cast<double>(routes) / static_cast<double>(counts.size());
  std::vector<double> loads;
  for (const std::int64_t count : counts) loads.push_back(static_cast<double>(count) / mean);
  std::sort(loads.begin(), loads.end());
  return {.routes = routes,
          .max = loads.back(),
          .p99 = percentile(loads, 99),
          .p90 = percentile(loads, 90),
          .p50 = percentile(loads, 50),
          .p10 = percentile(loads, 10),
          .min = loads.front(),
          .sigma_ln = sigma_ln(loads),
          .gini = gini(loads),
          .idle = static_cast<int>(std::count(counts.begin(), counts.end(), 0))};
}

LoadStatistics median(std::span<const LoadStatistics> layers) {
  if (layers.empty()) throw UsageError("load statistics: expected at least one layer, found none");
  const auto of = [&](auto LoadStatistics::* figure) {
    std::vector<double> values;
    for (const LoadStatistics& layer : layers) values.push_back(static_cast<double>(layer.*figure));
    return middle(values);
  };
  return {.routes = static_cast<std::int64_t>(of(&LoadStatistics::routes)),
          .max = of(&LoadStatistics::max),
          .p99 = of(&LoadStatistics::p99),
          .p90 = of(&LoadStatistics::p90),
          .p50 = of(&LoadStatistics::p50),
          .p10 = of(&LoadStatistics::p10),
          .min = of(&LoadStatistics::min),
          .sigma_ln = of(&LoadStatistics::sigma_ln),
          .gini = of(&LoadStatistics::gini),
          .idle = static_cast<int>(of(&LoadStatistics::idle))};
}

double busiest(std::span<const std::int64_t> counts) {
  const auto sum = static_cast<double>(checked_sum(counts));
  return static_cast<double>(*std::max_element(counts.begin(), counts.end())) *
         static_cast<double>(counts.size()) / sum;
}

double adjacent_overlap(const Trace& trace, int layer) {
  const TokenIds ids = trace.layer_ids(layer);
  std::vector<std::int64_t> lengths = trace.sequence_lengths;
  if (lengths.empty()) lengths.push_back(trace.tokens);
  std::int64_t shared = 0, pairs = 0, first = 0;
  for (const std::int64_t length : lengths) {
    for (std::int64_t token = first + 1; token < first + length; ++token, ++pairs) {
      shared += shared_experts(token_ids(ids, token - 1, trace.top_k), token_ids(ids, token, trace.top_k));
    }
    first += length;
  }
  return pairs ? static_cast<double>(shared) / static_cast<double>(pairs) : 0.0;
}

double distinct_ranks(const Trace& trace, int layer, const Placement& placement) {
  require_experts(placement, static_cast<std::size_t>(trace.experts));
  const Blocks blocks(trace, placement, 0);
  const TokenIds ids = trace.layer_ids(layer);
  // The last token counted for each rank. Unlike a set of ranks, it need not be cleared between tokens.
  std::vector<std::int64_t> last_token(static_cast<std::size_t>(placement.ranks()), -1);
  std::int64_t distinct = 0;
  for (std::int64_t token = 0; token < trace.tokens; ++token) {
    const TokenIds of_token = token_ids(ids, token, trace.top_k);
    for (std::size_t slot = 0; slot < of_token.size(); ++slot) {
      if (of_token[slot] < 0) continue;
      const int rank = placement.location(of_token[slot], blocks.origin(token, slot)).rank;
      std::int64_t& last = last_token[static_cast<std::size_t>(rank)];
      distinct += last != token;
      last = token;
    }
  }
  return static_cast<double>(distinct) / static_cast<double>(trace.tokens);
}

}  // namespace ferry
