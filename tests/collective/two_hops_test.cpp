// Two hops of the backend `collective`: what the contract suite on simulated hosts does not reach. Windows,
// calls in phases, refusals, relays that fail, and the way that every message takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ferry/ferry.hpp"
#include "harness/thread_engine.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

constexpr int kHidden = 64;

struct Nodes {
  const char* name;
  std::vector<int> labels;  // node of each rank
};

// Uneven nodes, and nodes whose ranks are not consecutive.
const Nodes kNodes[] = {{"2 x 2", {0, 0, 1, 1}},
                        {"taking turns", {0, 1, 0, 1}},
                        {"3 + 1", {0, 0, 0, 1}},
                        {"1 + 2 + 5", {0, 1, 1, 2, 2, 2, 2, 2}},
                        {"5 + 3 mixed", {0, 1, 0, 0, 1, 0, 1, 0}},
                        {"4 x 4 mixed", {0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0}}};

// Runs `body` as every rank, in threads, one simulated host for each node. Returns what each rank threw.
std::vector<std::string> run_nodes(const std::vector<int>& labels,
                                   const std::function<EngineFunctions(int)>& functions,
                                   const std::function<void(Rank)>& body) {
  const int ranks = static_cast<int>(labels.size());
  const TestBootstrap meeting(ranks);
  std::vector<std::string> errors(labels.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto r = static_cast<std::size_t>(rank);
      try {
        Bootstrap bootstrap = meeting.bootstrap(rank);
        bootstrap.host_id = std::to_string(labels[r]);
        Group::custom(bootstrap, functions(rank)).run(body);
      } catch (const std::exception& error) {
        errors[r] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void run_nodes(const std::vector<int>& labels, const std::function<void(Rank)>& body) {
  const ThreadEngine engine(static_cast<int>(labels.size()));
  for (const std::string& error : run_nodes(labels, [&](int r) { return engine.functions(r); }, body))
    EXPECT_EQ(error, "");
}

Config config_of(int ranks, Hops hops, int window = 0, ReductionLevel level = ReductionLevel::automatic) {
  return {.experts = 2 * ranks,
          .top_k = 3,
          .hidden = kHidden,
          .max_tokens = 40,
          .backend = BackendKind::collective,
          .hops = hops,
          .window = window,
          .format = Format::fp32(),
          .combine_type = DType::fp32,
          .reduction = Reduction::exact,
          .reduction_level = level};
}

// The inputs of one rank.
struct Inputs {
  std::int64_t count;
  std::vector<float> tokens, weights;
  std::vector<std::int32_t> ids;

  Inputs(const Config& config, int rank, std::int64_t tokens_of_rank)
      : count(tokens_of_rank), tokens(count * kHidden), weights(count * config.top_k) {
    std::uint32_t state = 2654435761u * static_cast<std::uint32_t>(rank + 1);
    auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
    for (float& value : tokens) value = static_cast<float>(next() % 1000) / 7 - 70;
    for (float& value : weights) value = static_cast<float>(next() % 64) / 16 - 2;
    for (std::int64_t i = 0; i < count * config.top_k; ++i)
      ids.push_back(static_cast<std::int32_t>(next() % static_cast<std::uint32_t>(config.experts + 1)) - 1);
  }
  Tokens given() const { return {.parts = {tokens.data()}, .count = count, .type = DType::fp32}; }
};

// What a rank gets: every array of the dispatch, and the results of combine.
struct Outcome {
  std::vector<float> rows, weights, partial, exact;
  std::vector<std::int32_t> counts;
  std::vector<Source> sources;

  bool operator==(const Outcome&) const = default;
};

// How a rank calls. `together`: in phases, and every rank has sent before any receives.
enum class Form { fused, phases, together };

void combine(Exchange& exchange, const DispatchResult& received, const Outputs& outputs, const Inputs& inputs,
             Reduction reduction, Form form, std::vector<float>& result) {
  result.assign(inputs.tokens.size(), -1);
  const CombineOptions options{.row_weights = received.weight, .reduction = reduction};
  const Result out{.data = result.data(), .type = DType::fp32};
  if (form == Form::fused) return exchange.combine(outputs, received.plan, out, options);
  exchange.combine_send(outputs, received.plan, out, options);
  if (form == Form::together) exchange.rank().barrier();
  exchange.combine_receive();
}

DispatchResult dispatch(Exchange& exchange, const Inputs& inputs, Form form) {
  const std::int32_t* ids = inputs.ids.data();
  if (form == Form::fused) return exchange.dispatch(inputs.given(), ids, inputs.weights.data());
  exchange.dispatch_send(inputs.given(), ids, inputs.weights.data());
  if (form == Form::together) exchange.rank().barrier();
  return exchange.dispatch_receive();
}

Outcome step(Exchange& exchange, const Inputs& inputs, Form form) {
  const DispatchResult received = dispatch(exchange, inputs, form);
  const auto total = static_cast<std::size_t>(*received.total);
  const auto* rows = static_cast<const float*>(received.data);
  Outcome outcome;
  outcome.rows.assign(rows, rows + total * kHidden);
  outcome.weights.assign(received.weight, received.weight + total);
  outcome.counts.assign(received.counts, received.counts + received.groups);
  outcome.sources.assign(received.source, received.source + total);
  const Outputs outputs{.data = outcome.rows.data(), .type = DType::fp32};
  combine(exchange, received, outputs, inputs, Reduction::partial, form, outcome.partial);
  combine(exchange, received, outputs, inputs, Reduction::exact, form, outcome.exact);
  return outcome;
}

// Rank 1 has no tokens.
Inputs inputs_of(const Config& config, int rank) {
  return {config, rank, rank == 1 ? 0 : config.max_tokens - rank};
}

// What every rank gets in one hop, in fused calls.
std::vector<Outcome> in_one_hop(const std::vector<int>& labels, ReductionLevel level) {
  std::vector<Outcome> outcomes(labels.size());
  run_nodes(labels, [&](const Rank& rank) {
    const Config config = config_of(rank.size(), Hops::one, 0, level);
    Exchange exchange(rank, config);
    outcomes[static_cast<std::size_t>(rank.index())] =
        step(exchange, inputs_of(config, rank.index()), Form::fused);
  });
  return outcomes;
}

TEST(TwoHops, DeliverTheBytesOfOneHopInAnyWindowAndForm) {
  for (const Nodes& nodes : kNodes) {
    const std::vector<Outcome> by_rank = in_one_hop(nodes.labels, ReductionLevel::rank);
    const std::vector<Outcome> by_node = in_one_hop(nodes.labels, ReductionLevel::node);
    const std::vector<Outcome> on_one_host =
        in_one_hop(std::vector<int>(nodes.labels.size()), ReductionLevel::rank);
    for (std::size_t rank = 0; rank < nodes.labels.size(); ++rank)
      EXPECT_TRUE(by_node[rank].exact == on_one_host[rank].exact) << nodes.name << ", rank " << rank;
    run_nodes(nodes.labels, [&](const Rank& rank) {
      for (const int window : {0, 1, 7, 64}) {
        const ReductionLevel level = window % 2 == 0 ? ReductionLevel::node : ReductionLevel::rank;
        const std::vector<Outcome>& expected = level == ReductionLevel::node ? by_node : by_rank;
        const Config config = config_of(rank.size(), Hops::automatic, window, level);
        Exchange exchange(rank, config);
        EXPECT_EQ(exchange.config().hops, Hops::two);
        const Inputs inputs = inputs_of(config, rank.index());
        for (const Form form : {Form::together, rank.index() % 2 == 0 ? Form::fused : Form::phases}) {
          EXPECT_TRUE(step(exchange, inputs, form) == expected[static_cast<std::size_t>(rank.index())])
              << nodes.name << ", window " << window << ", rank " << rank.index();
        }
      }
    });
  }
}

TEST(TwoHops, AWindowBoundsEveryRoundAndAllTokensOfOneExpertPass) {
  const std::vector<int> labels = {0, 1, 0, 1, 1};
  constexpr int kTokens = 4096, kWindow = 64;
  const ThreadEngine engine(5);
  std::atomic<std::int64_t> largest = 0;
  const auto watched = [&](int rank) {
    EngineFunctions functions = engine.functions(rank);
    functions.all_to_all_v = [&, all_to_all_v = functions.all_to_all_v](
                                 int lane, const void* from, const std::int64_t* bytes, auto... others) {
      for (int peer = 0; peer < 5; ++peer) {
        std::int64_t seen = largest;
        while (bytes[peer] > seen && !largest.compare_exchange_weak(seen, bytes[peer])) {
        }
      }
      all_to_all_v(lane, from, bytes, others...);
    };
    return functions;
  };
  const auto errors = run_nodes(labels, watched, [&](const Rank& rank) {
    Config config = config_of(5, Hops::two, kWindow);
    config.max_tokens = kTokens;
    config.reduction = Reduction::partial;
    config.top_k = 1;
    Exchange exchange(rank, config);
    Inputs inputs(config, rank.index(), kTokens);
    std::fill(inputs.ids.begin(), inputs.ids.end(), 3);
    const DispatchResult received = dispatch(exchange, inputs, Form::fused);
    EXPECT_EQ(*received.total, rank.index() == 1 ? 5 * kTokens : 0);
    std::vector<float> result;
    combine(exchange, received, {.data = received.data, .type = DType::fp32}, inputs, Reduction::partial,
            Form::fused, result);
    for (std::size_t i = 0; i < result.size(); i += 97)
      ASSERT_EQ(result[i], inputs.tokens[i] * inputs.weights[i / kHidden]) << "element " << i;
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  // A round of messages is larger than the blocks of fixed size. 272: the message's row, head, id and weight.
  EXPECT_EQ(largest, kWindow * 272);
}

// The counts are what the engine carries: for each transfer of messages, bytes to ranks of other nodes.
TEST(TwoHops, WireCountsAreWhatTheEngineCarries) {
  for (const Nodes& nodes : kNodes) {
    const int ranks = static_cast<int>(nodes.labels.size());
    const ThreadEngine engine(ranks);
    struct Carried {
      std::int64_t within = 0, between = 0;
      int transfers = 0;
    };
    std::vector<Carried> carried(nodes.labels.size());
    const auto counting = [&](int rank) {
      EngineFunctions functions = engine.functions(rank);
      functions.all_to_all_v = [&, rank, all_to_all_v = functions.all_to_all_v](
                                   int lane, const void* from, const std::int64_t* bytes, auto... others) {
        Carried& mine = carried[static_cast<std::size_t>(rank)];
        // Blocks, first hop, blocks, second hop.
        for (int peer = 0; mine.transfers % 2 == 1 && peer < ranks; ++peer) {
          const bool near =
              nodes.labels[static_cast<std::size_t>(peer)] == nodes.labels[static_cast<std::size_t>(rank)];
          (near ? mine.within : mine.between) += bytes[peer];
        }
        ++mine.transfers;
        all_to_all_v(lane, from, bytes, others...);
      };
      return functions;
    };
    const auto errors = run_nodes(nodes.labels, counting, [&](const Rank& rank) {
      const Config config = config_of(ranks, Hops::two);
      Exchange exchange(rank, config);
      const Inputs inputs = inputs_of(config, rank.index());
      step(exchange, inputs, Form::fused);
      const Carried& mine = carried[static_cast<std::size_t>(rank.index())];
      const WireCounts wire = exchange.wire_counts();
      EXPECT_EQ(mine.transfers, 3 * 4);
      EXPECT_EQ(wire.between_nodes.dispatch_bytes + wire.between_nodes.combine_bytes, mine.between);
      EXPECT_EQ(wire.dispatch_bytes + wire.combine_bytes, mine.within + mine.between);
      // Between nodes: one message for each token and other node.
      std::set<std::pair<std::int64_t, int>> pairs;
      for (std::size_t i = 0; i < inputs.ids.size(); ++i) {
        if (inputs.ids[i] < 0) continue;
        const int node = rank.topology().node_of(inputs.ids[i] / 2);
        if (node != rank.topology().node_of(rank.index())) pairs.insert({i / 3, node});
      }
      EXPECT_EQ(wire.between_nodes.dispatch_messages, static_cast<std::int64_t>(pairs.size())) << nodes.name;
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

// Weights and values are words: a relay neither adds them nor looks at them.
TEST(TwoHops, RouteValuesKeepEveryBit) {
  struct Case {
    Reduction reduction;
    ReductionLevel level;
  };
  for (const auto& [reduction, level] : {Case{Reduction::partial, ReductionLevel::rank},
                                         {Reduction::partial, ReductionLevel::node},
                                         {Reduction::exact, ReductionLevel::node}}) {
    run_nodes({0, 1, 1, 0, 0}, [&, reduction = reduction, level = level](const Rank& rank) {
      const Config config = config_of(5, Hops::two, 7, level);
      Exchange exchange(rank, config);
      const Inputs inputs = inputs_of(config, rank.index());
      const DispatchResult received = dispatch(exchange, inputs, Form::fused);
      std::vector<float> values(inputs.ids.size()), back(inputs.ids.size()), rows(*received.total);
      const std::uint32_t bits[] = {0x80000000, 0x7FA00001, 0xFFC0BEEF, 0x7F800000, 1};
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint32_t word = bits[i % 5] ^ static_cast<std::uint32_t>(rank.index());
        std::memcpy(&values[i], &word, 4);
      }
      exchange.route_values(values.data(), received.plan, rows.data());
      const Outputs outputs{.data = received.data, .type = DType::fp32};
      std::vector<float> result(inputs.tokens.size());
      exchange.combine(outputs, received.plan, {.data = result.data(), .type = DType::fp32},
                       {.reduction = reduction, .row_values = rows.data(), .route_values = back.data()});
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float expected = inputs.ids[i] < 0 ? 0.0f : values[i];
        EXPECT_EQ(std::memcmp(&back[i], &expected, 4), 0) << "route " << i << " of rank " << rank.index();
      }
    });
  }
}

TEST(TwoHops, ARefusalEndsTheCallOnEveryRank) {
  run_nodes({0, 0, 1, 1}, [&](const Rank& rank) {
    const Config config = config_of(4, Hops::two, 7);
    Exchange exchange(rank, config);
    const Inputs inputs = inputs_of(config, rank.index());
    for (int refusing = 0; refusing < 4; ++refusing) {
      const Form form = (rank.index() + refusing) % 2 == 0 ? Form::fused : Form::phases;
      Inputs mine = inputs;
      if (rank.index() == refusing) mine.count = config.max_tokens + 1;
      EXPECT_THROW(dispatch(exchange, mine, form), UsageError);
      step(exchange, inputs, form);
    }
  });
}

// The engine of a relay fails between the hops: its host learns at once, the other one at the deadline.
TEST(TwoHops, ARelayThatFailsEndsEveryCallInTime) {
  const ThreadEngine engine(4);
  std::atomic<int> transfers = 0;
  const auto failing = [&](int rank) {
    EngineFunctions functions = engine.functions(rank);
    if (rank != 2) return functions;
    functions.all_to_all_v = [&, all_to_all_v = functions.all_to_all_v](auto... arguments) {
      if (++transfers == 3) throw std::runtime_error("the relay is out");
      all_to_all_v(arguments...);
    };
    return functions;
  };
  const auto body = [&](const Rank& rank) {
    Config config = config_of(4, Hops::two);
    config.deadline = 0.5;
    Exchange exchange(rank, config);
    const Inputs inputs = inputs_of(config, rank.index());
    const auto start = std::chrono::steady_clock::now();
    try {
      dispatch(exchange, inputs, rank.index() % 2 == 0 ? Form::fused : Form::phases);
      ADD_FAILURE() << "rank " << rank.index() << " did not notice";
    } catch (const PeerLostError& error) {
      EXPECT_EQ(error.record.peer, 2);
      EXPECT_NE(std::string(error.what()).find("the relay is out"), std::string::npos) << error.what();
    } catch (const TimeoutError& error) {
      EXPECT_LT(rank.index(), 2) << error.what();  // of the other host
    }
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    EXPECT_LT(waited.count(), 1.5);
    EXPECT_THROW(exchange.metadata(1), Error);
  };
  run_nodes({0, 0, 1, 1}, failing, body);
}

// Rank 0 stays in the first hop. Its node's other ranks wait for what it forwards.
TEST(TwoHops, ATimeoutNamesTheRelayThatIsLate) {
  const ThreadEngine engine(4);
  std::atomic<bool> ended = false;
  const auto staying = [&](int rank) {
    EngineFunctions functions = engine.functions(rank);
    if (rank != 0) return functions;
    functions.all_to_all_v = [&, transfers = 0,
                              all_to_all_v = functions.all_to_all_v](auto... arguments) mutable {
      all_to_all_v(arguments...);
      ++transfers;
      while (transfers == 2 && !ended) sleep_seconds(0.001);
    };
    return functions;
  };
  const auto body = [&](const Rank& rank) {
    Config config = config_of(4, Hops::two);
    config.deadline = 0.5;
    Exchange exchange(rank, config);
    const Inputs inputs = inputs_of(config, rank.index());
    try {
      if (rank.index() == 1) {
        dispatch(exchange, inputs, Form::fused);
      } else {  // waits later, so that rank 1 is the first whose deadline passes
        exchange.dispatch_send(inputs.given(), inputs.ids.data(), inputs.weights.data());
        sleep_seconds(0.3);
        exchange.dispatch_receive();
      }
      ADD_FAILURE() << "rank " << rank.index() << " did not notice";
    } catch (const TimeoutError& error) {
      if (rank.index() > 1) return;
      EXPECT_EQ(error.record.peer, -1) << error.what();
      EXPECT_EQ(error.record.via, 0) << error.what();
      EXPECT_NE(std::string(error.what()).find("by way of rank 0"), std::string::npos) << error.what();
    }
    if (rank.index() == 1) ended = true;
  };
  for (const std::string& error : run_nodes({0, 0, 1, 1}, staying, body)) EXPECT_EQ(error, "");
}

// A rank that does not call. Of the other host only a rank that is alone there is known to be the one.
TEST(TwoHops, ATimeoutNamesTheRankThatHasNotCalled) {
  for (const int missing : {0, 2}) {
    const ThreadEngine engine(3);
    std::atomic<int> timeouts = 0;
    const auto body = [&](const Rank& rank) {
      Config config = config_of(3, Hops::two);
      config.deadline = 0.5;
      Exchange exchange(rank, config);
      if (rank.index() == missing) {
        while (timeouts < 2) sleep_seconds(0.001);
        return;
      }
      try {
        dispatch(exchange, inputs_of(config, rank.index()), Form::phases);
      } catch (const TimeoutError& error) {
        const bool is_known = missing == 2 || rank.index() == 1;
        EXPECT_EQ(error.record.peer, is_known ? missing : -1) << error.what();
      }
      ++timeouts;
    };
    run_nodes({0, 0, 1}, [&](int rank) { return engine.functions(rank); }, body);
    EXPECT_EQ(timeouts, 2);
  }
}

}  // namespace
}  // namespace ferry::test
