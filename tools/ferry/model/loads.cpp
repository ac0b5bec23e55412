#include "tools/ferry/model/loads.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "trace/random.hpp"

namespace ferry::app {

namespace {

// Items of one kind that every rank sends and receives.
struct Counts {
  explicit Counts(int ranks) : out(static_cast<std::size_t>(ranks)), in(out.size()) {}

  void add(int from, int to) {
    ++out[static_cast<std::size_t>(from)];
    ++in[static_cast<std::size_t>(to)];
  }
  double mean() const {
    return static_cast<double>(std::accumulate(in.begin(), in.end(), std::int64_t{0})) /
           static_cast<double>(in.size());
  }
  double busiest() const {
    return static_cast<double>(
        std::max(*std::max_element(out.begin(), out.end()), *std::max_element(in.begin(), in.end())));
  }

  std::vector<std::int64_t> out, in;
};

// How loads of the tokens that were counted grow to those of all tokens.
struct Growth {
  double mean = 1;    // of the mean
  double beyond = 1;  // of what the busiest rank has beyond the mean
};

class LoadCounter {
 public:
  explicit LoadCounter(const RoutingShape& shape)
      : shape_(shape),
        own_(shape.ranks),
        near_(shape.ranks),
        near_routes_(shape.ranks),
        far_(shape.ranks),
        far_routes_(shape.ranks),
        far_nodes_(shape.ranks),
        forwarded_(shape.ranks),
        routes_(shape.ranks),
        rank_seen_(static_cast<std::size_t>(shape.ranks), -1),
        node_seen_(static_cast<std::size_t>(shape.nodes), -1) {}

  void add(int source, std::span<const std::int32_t> ids) {
    ++token_;
    const int on_node = shape_.node_ranks(), source_node = source / on_node;
    for (const std::int32_t id : ids) {
      if (id < 0) continue;
      const auto to = static_cast<int>(std::int64_t{id} * shape_.ranks / shape_.experts);
      const int node = to / on_node;
      const bool new_rank = seen(rank_seen_, to), new_node = seen(node_seen_, node);
      routes_.add(source, to);
      if (to == source) {
        if (new_rank) own_.add(source, to);
      } else if (node == source_node) {
        near_routes_.add(source, to);
        if (new_rank) near_.add(source, to);
      } else {
        const int relay = node * on_node + source % on_node;
        far_routes_.add(source, to);
        if (new_rank) far_.add(source, to);
        if (new_node) far_nodes_.add(source, relay);
        if (new_rank && to != relay) forwarded_.add(relay, to);
      }
    }
  }

  Loads loads(Growth growth) const {
    const auto grown = [&](const Counts& counts) {
      return counts.mean() * growth.mean + (counts.busiest() - counts.mean()) * growth.beyond;
    };
    Counts arriving = routes_;
    arriving.out = arriving.in;  // every rank sends as many as it has tokens and slots
    return {.own = own_.mean() * growth.mean,
            .near = grown(near_),
            .near_routes = grown(near_routes_),
            .far = grown(far_),
            .far_routes = grown(far_routes_),
            .far_nodes = grown(far_nodes_),
            .forwarded = grown(forwarded_),
            .routes = grown(arriving)};
  }

 private:
  // Whether the current token has not been there yet.
  bool seen(std::vector<std::int64_t>& last, int at) const {
    std::int64_t& token = last[static_cast<std::size_t>(at)];
    if (token == token_) return false;
    token = token_;
    return true;
  }

  RoutingShape shape_;
  Counts own_, near_, near_routes_, far_, far_routes_, far_nodes_, forwarded_, routes_;
  std::vector<std::int64_t> rank_seen_, node_seen_;  // the last token that went there
  std::int64_t token_ = -1;
};

int counted_tokens(const RoutingShape& shape) {
  return static_cast<int>(std::clamp<std::int64_t>(kSimulatedTokens / shape.ranks, 1, shape.tokens));
}

}  // namespace

Loads uniform_loads(const RoutingShape& shape, std::uint64_t seed) {
  LoadCounter counter(shape);
  trace::Random random(seed, 0);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(shape.top_k));
  const int counted = counted_tokens(shape);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (int token = 0; token < counted; ++token) {
      // Floyd's sampling: K distinct experts with K draws.
      for (int slot = 0; slot < shape.top_k; ++slot) {
        const int last = shape.experts - shape.top_k + slot;
        const auto drawn = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(last) + 1));
        const auto end = ids.begin() + slot;
        *end = std::find(ids.begin(), end, drawn) == end ? drawn : last;
      }
      counter.add(rank, ids);
    }
  }
  const double growth = static_cast<double>(shape.tokens) / counted;
  return counter.loads({.mean = growth, .beyond = std::sqrt(growth)});
}

Loads trace_loads(const RoutingShape& shape, const Trace& trace) {
  const int counted = counted_tokens(shape), layers = std::min(trace.layers, 4);
  Loads sum;
  for (int layer = 0; layer < layers; ++layer) {
    LoadCounter counter(shape);
    for (int rank = 0; rank < shape.ranks; ++rank) {
      const TracePartition mine = partition(
          trace, {.layer = layer, .rank = rank, .ranks = shape.ranks, .tokens_per_rank = counted, .step = 0});
      const std::span<const std::int32_t> ids = mine.ids;
      const auto k = static_cast<std::size_t>(shape.top_k);
      for (std::size_t at = 0; at < ids.size(); at += k) counter.add(rank, ids.subspan(at, k));
    }
    const double growth = static_cast<double>(shape.tokens) / counted;
    const Loads one = counter.loads({.mean = growth, .beyond = growth});
    for (double Loads::* each : {&Loads::own, &Loads::near, &Loads::near_routes, &Loads::far,
                                 &Loads::far_routes, &Loads::far_nodes, &Loads::forwarded, &Loads::routes})
      sum.*each += one.*each / layers;
  }
  return sum;
}

double expected_groups(int experts, int group, int top_k) {
  double missed = 1;  // probability that no chosen expert is in a given group
  for (int slot = 0; slot < top_k; ++slot)
    missed *= std::max(0.0, static_cast<double>(experts - group - slot)) / (experts - slot);
  return static_cast<double>(experts) / group * (1 - missed);
}

}  // namespace ferry::app
