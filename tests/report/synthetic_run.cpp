#include "report/synthetic_run.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace ferry::report {
namespace {

constexpr int kTokens = 128;
constexpr int kTopK = 8;
constexpr int kHidden = 7168;

class Maker {
 public:
  Maker(std::uint64_t seed, const RunShape& shape) : random_(seed), shape_(shape) {}

  RunReport make(std::uint64_t seed) {
    describe(seed);
    add_load();
    add_times();
    add_traffic(run_.dispatch);
    add_traffic(run_.combine);
    add_checks();
    return run_;
  }

 private:
  double unit() { return std::uniform_real_distribution<double>(0.0, 1.0)(random_); }
  double lognormal(double sigma) { return std::exp(std::normal_distribution<double>(0.0, sigma)(random_)); }

  // Nodes of different sizes, with ranks that are not consecutive.
  std::vector<int> nodes() const {
    std::vector<int> node_of_rank(static_cast<std::size_t>(shape_.ranks), 0);
    for (int rank = 0; shape_.ranks > 4 && rank < shape_.ranks; ++rank)
      node_of_rank[static_cast<std::size_t>(rank)] = rank % 4 == 3 ? 1 : rank % 3;
    return node_of_rank;
  }

  void describe(std::uint64_t seed) {
    run_.ferry_version = "0.1.0";
    run_.command = "ferry run --ranks " + std::to_string(shape_.ranks) +
                   " --html \"</script><b>&amp;\" --trace synth:decode";
    run_.started_at = "2026-11-21T04:00:00Z";
    run_.workload = {
        .trace = "synth:decode",
        .synthesised = true,
        .description = "synthesised: lognormal popularity, 1 % hot experts, blocks of neighbours",
        .recipe = "synth:decode:experts=" + std::to_string(shape_.experts) + ",top_k=8,tokens=4096,layers=4",
        .seed = seed | 0x8000000000000001u,
        .layers = 4,
        .tokens = 4096,
        .tokens_per_rank = kTokens,
        .steps = shape_.steps};
    run_.configuration = {.backend = "cpu",
                          .ranks = shape_.ranks,
                          .group = "threads",
                          .nodes = shape_.ranks > 4 ? 3 : 1,
                          .simulated_nodes = shape_.ranks > 4,
                          .node_of_rank = nodes(),
                          .hops = shape_.ranks > 4 ? "two" : "one",
                          .experts = shape_.experts,
                          .shared_experts = 2,
                          .top_k = kTopK,
                          .hidden = kHidden,
                          .max_tokens = kTokens,
                          .layout = "expert_major",
                          .format = "bf16",
                          .reduction = "partial",
                          .reduction_level = shape_.ranks > 4 ? "node" : "rank",
                          .combine_type = "bf16",
                          .expert_function = "SwiGLU, 256 inner columns, fp32, OpenBLAS"};
    run_.machine = {.cpu = "AMD EPYC",
                    .cores = 2,
                    .memory_bytes = 8'340'000'000,
                    .memcpy_threads = shape_.ranks,
                    .memcpy_bytes_per_second = 18.3e9 * (1 + 0.1 * unit())};
  }

  void add_load() {
    std::vector<double> popularity(static_cast<std::size_t>(shape_.experts));
    for (double& p : popularity) p = lognormal(0.65);
    popularity[static_cast<std::size_t>(unit() * shape_.experts)] *= 5;
    const double sum = std::accumulate(popularity.begin(), popularity.end(), 0.0);
    const double routes = static_cast<double>(shape_.steps) * shape_.ranks * kTokens * kTopK;

    run_.load.shared_rows_per_rank = 2 * run_.workload.tokens_per_rank * run_.workload.steps;
    run_.load.rows_per_rank.assign(static_cast<std::size_t>(shape_.ranks), 0);
    for (int expert = 0; expert < shape_.experts; ++expert) {
      const int rank = static_cast<int>(static_cast<std::int64_t>(expert) * shape_.ranks / shape_.experts);
      const auto load =
          static_cast<std::int64_t>(routes * popularity[static_cast<std::size_t>(expert)] / sum);
      run_.load.rank_of_expert.push_back(rank);
      run_.load.routes_per_expert.push_back(load);
      run_.load.rows_per_rank[static_cast<std::size_t>(rank)] += load;
    }
  }

  // Stages follow one another; every rank starts a little late.
  void add_times() {
    double now = 1000;
    const double size = shape_.ranks / 8.0;  // with more ranks than cores
    const auto advance = [](double& clock, double us) {
      const double begin = clock;
      clock = std::round((clock + us) * 1000) / 1000;
      return Span{.begin_us = begin, .end_us = clock};
    };
    for (int step = 0; step < shape_.steps; ++step) {
      double latest = now;
      for (int rank = 0; rank < shape_.ranks; ++rank) {
        double clock = std::round((now + size * 900 * unit()) * 1000) / 1000;
        StepTimes& times = run_.times.emplace_back();
        times[StepStage::dispatch] = advance(clock, size * 15'000 * lognormal(0.15));
        times[StepStage::experts] = advance(clock, size * 48'000 * lognormal(0.08));
        times[StepStage::combine] = advance(clock, size * 17'000 * lognormal(unit() < 0.01 ? 1.0 : 0.15));
        latest = std::max(latest, clock);
      }
      now = latest;
    }
  }

  void add_traffic(Traffic& traffic) {
    const double share = 1.0 - std::pow(1.0 - 1.0 / shape_.ranks, kTopK);
    const double bytes = static_cast<double>(shape_.steps) * kTokens * kHidden * 2 * share;
    for (int from = 0; from < shape_.ranks; ++from) {
      for (int to = 0; to < shape_.ranks; ++to) {
        const auto load = run_.load.rows_per_rank[static_cast<std::size_t>(to)];
        const double of_mean = static_cast<double>(load) * shape_.ranks /
                               (static_cast<double>(shape_.steps) * shape_.ranks * kTokens * kTopK);
        const auto amount = static_cast<std::int64_t>(bytes * std::min(of_mean, 2.0) * (0.9 + 0.2 * unit()));
        traffic.traffic_bytes.push_back(amount);
        if (from != to) traffic.wire_bytes += amount;
      }
    }
    traffic.messages = traffic.wire_bytes / (kHidden * 2);
    traffic.moved_bytes = 3 * traffic.wire_bytes;
  }

  void add_checks() {
    run_.checks = {{.name = "dispatch, bit for bit",
                    .passed = true,
                    .compared = 1'468'006'400,
                    .detail = "against the oracle"},
                   {.name = "combine, bit for bit",
                    .passed = true,
                    .compared = 183'500'800,
                    .detail = "scaling experts"},
                   {.name = "SwiGLU against dense fp32",
                    .passed = true,
                    .compared = 7'340'032,
                    .error = 0.001 + 0.01 * unit(),
                    .tolerance = 0.02,
                    .detail = "every token of the first step"}};
  }

  std::mt19937_64 random_;
  RunShape shape_;
  RunReport run_;
};

}  // namespace

RunReport synthetic_run(std::uint64_t seed, const RunShape& shape) {
  return Maker(seed, shape).make(seed);
}

}  // namespace ferry::report
