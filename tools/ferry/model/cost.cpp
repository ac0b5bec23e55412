#include "tools/ferry/model/cost.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numeric>
#include <span>
#include <vector>

#include "ferry/error.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "tools/ferry/common/config.hpp"
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

namespace {

// Facts of the kernels: src/backends/cuda/host/role_costs.cpp names both.
constexpr int kManyTokens = 256;
constexpr int kLLMessages = 32;

constexpr int kWindowMessages = 64;  // two hops: messages that a relay has before it forwards the first
constexpr double kSharpness = 4;     // exponent of smooth_max()
constexpr double kPerGiga = 1e-3;    // us for bytes over GB/s
// Bytes of a row of 7,168 bf16 values. The constants combine_many and those of quantising were measured with
// it.
constexpr double kRowBytes = 2 * 7168;

// Near the largest of the terms; up to 2^(1/4) = 1.19 times it where two are equal, because what overlaps
// still gets into each other's way.
double smooth_max(std::initializer_list<double> terms) {
  const double most = std::max(terms);
  if (most <= 0) return 0;
  double sum = 0;
  for (const double term : terms) sum += std::pow(term / most, kSharpness);
  return most * std::pow(sum, 1 / kSharpness);
}

// us of an SM to quantise one token of this call; 0 if the format does not quantise.
double quantising(const ModelCall& call, const Constants& constants) {
  const Encoding encoding = encoding_of(call.format);
  if (!encoding.quantises()) return 0;
  const double scale = static_cast<double>(call.row_bytes()) / kRowBytes;
  if (encoding.is_two_level())
    return constants[encoding.row_scale ? Constant::nvfp4_token : Constant::nvfp4] * scale;
  return constants[encoding.element == ElementType::e2m1 ? Constant::mxfp4 : Constant::fp8] * scale;
}

// The machine as one rank sees it.
struct RankMachine {
  RankMachine(const GpuLimits& limits, const ModelCall& call) {
    const auto gpus = static_cast<double>(std::max<std::size_t>(limits.gpus.size(), 1));
    // Limits with fewer GPUs than ranks were measured with ranks that share them.
    sharing = std::max(1.0, limits.ranks / gpus);
    const double all = limits.push.empty() ? 1 : limits.push.back().first;
    sms = all / sharing;
    if (call.call.sm_limit > 0) sms = std::min<double>(sms, call.call.sm_limit);
    push = best_push(limits, call.call.sm_limit) * 1e-9;
    flag_us = limits.flag_seconds * 1e6;
  }

  double sharing;  // ranks on a GPU
  double sms;      // of a call
  double push;     // GB/s out of a rank to the ranks of its node
  double flag_us;
};

struct Terms {
  double start = 0;
  int kernels_between_nodes = 0;  // of a call, where ranks have several nodes; one node: one kernel
  double near_bytes = 0, far_bytes = 0, far_rows = 0;  // on the link, on the network
  double row_bytes = 0;                                // of a row that travels
  double sm_us = 0;                                    // work of one SM that did all
  double memory_bytes = 0;
};

Terms dispatch_terms(const ModelCall& call, const Loads& loads, const Constants& constants) {
  const auto bytes = static_cast<double>(call.message_bytes()), token = static_cast<double>(call.row_bytes());
  const bool few = call.shape.tokens < kManyTokens, two = call.hops == Hops::two;
  const double arrivals = loads.arrivals();
  const double rows = call.layout == Layout::rank_major ? arrivals : std::max(loads.routes, arrivals);
  const double quantise = quantising(call, constants);
  const double staged = two ? loads.far_nodes : loads.far, forwarded = two ? loads.forwarded : 0;
  Terms terms;
  terms.kernels_between_nodes = 3;
  terms.start = few ? constants[Constant::dispatch_few] + quantise : constants[Constant::dispatch_many];
  terms.near_bytes = (loads.near + forwarded) * bytes;
  terms.far_bytes = staged * bytes;
  terms.far_rows = staged;
  terms.row_bytes = bytes;
  terms.sm_us = (rows + staged + forwarded) * bytes / constants[Constant::store] * kPerGiga +
                call.shape.tokens * quantise;
  // Tokens are read, rows written, arrived messages read. What crosses the network is also written to send
  // staging, read by the NIC, and written by the peer's; a relay reads it.
  terms.memory_bytes = call.shape.tokens * token + (rows + arrivals) * bytes + (two ? 4 : 3) * staged * bytes;
  return terms;
}

Terms combine_terms(const ModelCall& call, const Loads& loads, const Constants& constants) {
  const auto bytes = static_cast<double>(call.row_bytes());
  const bool partial = call.call.reduction == Reduction::partial, two = call.hops == Hops::two;
  const double pairs = loads.arrivals();
  const double rows = call.layout == Layout::rank_major ? pairs : std::max(loads.routes, pairs);
  const bool packets = partial && call.shape.nodes == 1 &&
                       call.shape.tokens * std::max(call.shape.ranks - 1, 1) <= kLLMessages;
  const bool few = call.shape.tokens < kManyTokens;
  const double near = partial ? loads.near : loads.near_routes;
  // Only sums become fewer in two hops: a relay adds those of its node.
  const double far = partial ? loads.far : loads.far_routes;
  const double staged = two && partial ? loads.far_nodes : far;
  const double forwarded = !two ? 0 : partial ? loads.forwarded : loads.far_routes;
  Terms terms;
  terms.kernels_between_nodes = 5;
  // The start of many tokens has a part in which the first rows fill the pipeline. It grows with their bytes.
  terms.start = constants[packets ? Constant::combine_ll : Constant::combine_few];
  if (!few)
    terms.start += (constants[Constant::combine_many] - constants[Constant::combine_few]) * bytes / kRowBytes;
  terms.near_bytes = (near + forwarded) * bytes * (packets ? 2 : 1);  // a packet is half flag
  terms.far_bytes = staged * bytes;
  terms.far_rows = staged;
  terms.row_bytes = bytes;
  const double added = two ? staged : 0;  // by relays
  terms.sm_us = partial ? rows * bytes / constants[Constant::read] * kPerGiga +
                              (pairs + added) * bytes / constants[Constant::sum] * kPerGiga
                        : (rows + added) * bytes / constants[Constant::row] * kPerGiga;
  // Rows are read, sums written, results written. Sums are read soon after, from the L2 cache.
  terms.memory_bytes =
      (rows + (partial ? pairs : rows) + call.shape.tokens) * bytes + (two ? 4 : 3) * staged * bytes;
  return terms;
}

// The steps of few tokens follow one another; those of many overlap, if they are in one launch.
Cost combined(const Terms& terms, const ModelCall& call, const Constants& constants,
              const RankMachine& machine, const Network& network) {
  const RoutingShape& shape = call.shape;
  const bool two = call.hops == Hops::two && shape.nodes > 1;
  Cost cost;
  cost.start = terms.start + constants[Constant::doubling] * std::log2(shape.ranks);
  cost.link = machine.push > 0 ? terms.near_bytes / machine.push * kPerGiga : 0;
  cost.sms = terms.sm_us / machine.sms;
  cost.memory = machine.sharing * terms.memory_bytes / constants[Constant::memory] * kPerGiga;
  if (shape.nodes > 1) {
    const int peers = two ? shape.nodes - 1 : shape.ranks - shape.node_ranks();
    const double post = 1e6 / network.messages_per_second, a_byte = 1e6 / network.bytes_per_second;
    cost.network = std::max(terms.far_bytes * a_byte, terms.far_rows * post) + 2 * peers * post;
    cost.start += network.latency_us + (two ? 2 * machine.flag_us : 0);
    if (two && shape.tokens >= kManyTokens)
      cost.start += std::min<double>(kWindowMessages, terms.far_rows) * terms.row_bytes * a_byte;
  }
  // Several nodes: the network moves rows in the second of three launches, and the SMs do their work in the
  // first and the third.
  const bool sms_overlap = shape.nodes == 1;
  if (shape.tokens >= kManyTokens)
    cost.total = cost.start + (sms_overlap ? 0 : cost.sms) +
                 smooth_max({cost.link, cost.network, sms_overlap ? cost.sms : 0, cost.memory});
  else if (two)
    cost.total = cost.start + cost.network + cost.link + cost.sms;
  else
    cost.total = cost.start + std::max(cost.network, cost.link) + cost.sms;
  // A further kernel costs as much as the second one of a call in phases.
  const int further = (call.call.in_phases ? 1 : 0) + (shape.nodes > 1 ? terms.kernels_between_nodes - 1 : 0);
  const double launches = further * constants[Constant::phases] +
                          (call.call.eager ? (1 + further) * constants[Constant::eager] : 0);
  cost.start += launches;
  cost.total += launches;
  return cost;
}

Cost sum_of(const Cost& a, const Cost& b) {
  return {.start = a.start + b.start,
          .link = a.link + b.link,
          .network = a.network + b.network,
          .sms = a.sms + b.sms,
          .memory = a.memory + b.memory,
          .total = a.total + b.total};
}

}  // namespace

std::int64_t ModelCall::message_bytes() const {
  const PartList parts = parts_of(format, hidden);
  std::int64_t bytes = 0;
  for (int p = 0; p < parts.count; ++p) bytes += parts.part[p].row_bytes;
  return bytes;
}

std::int64_t ModelCall::row_bytes() const {
  return std::int64_t{hidden} * bytes_of(token_type(format));
}

const char* Cost::largest() const {
  const char* name = "start";
  double most = start;
  const auto consider = [&](double term, const char* its_name) {
    if (term > most) most = term, name = its_name;
  };
  consider(link, "link");
  consider(network, "network");
  consider(sms, "SMs");
  consider(memory, "memory");
  return name;
}

Cost cost_of(const ModelCall& call, const Loads& loads, const Constants& constants, const GpuLimits& limits,
             const Network& network) {
  const RankMachine machine(limits, call);
  const auto dispatch = [&] {
    return combined(dispatch_terms(call, loads, constants), call, constants, machine, network);
  };
  const auto combine = [&] {
    return combined(combine_terms(call, loads, constants), call, constants, machine, network);
  };
  switch (call.call.work) {
    case Work::dispatch:
      return dispatch();
    case Work::dispatch_plan: {
      Cost cost = dispatch();
      cost.start += constants[Constant::plan];
      cost.total += constants[Constant::plan];
      return cost;
    }
    case Work::combine:
      return combine();
    case Work::pair:
      return sum_of(dispatch(), combine());
    case Work::metadata:
    case Work::nccl:
    case Work::nccl_rows:
      break;
  }
  throw UsageError(fmt::format("the model has no times of {}", to_string(call.call.work)));
}

LinkBytes link_bytes(const ModelCall& call, const Loads& loads) {
  const Constants any;
  const Terms terms =
      call.call.work == Work::combine ? combine_terms(call, loads, any) : dispatch_terms(call, loads, any);
  return {.between = terms.far_bytes, .within = terms.near_bytes};
}

const std::vector<Network>& networks() {
  // Usable: 90 % of the line rate. Latencies and message rates are assumptions, not measurements.
  static const std::vector<Network> known{
      {"ib200", "one 200 Gb/s InfiniBand NIC for each rank", 22.5e9, 4, 50e6},
      {"ib400", "one 400 Gb/s InfiniBand NIC for each rank", 45e9, 4, 50e6},
      {"ib800", "one 800 Gb/s InfiniBand NIC for each rank", 90e9, 4, 50e6},
      {"roce400", "one 400 Gb/s RoCE NIC for every two ranks", 22.5e9, 6, 25e6},
  };
  return known;
}

}  // namespace ferry::app
