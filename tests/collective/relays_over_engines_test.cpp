// Two hops of the backend `collective`: rounds, the way that every message takes, and relays that fail, as
// the engine sees them. two_hops_test.cpp has what does not depend on the backend.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "collective/two_hop_steps.hpp"
#include "ferry/ferry.hpp"
#include "harness/thread_engine.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

Config config_of(int ranks, Hops hops, int window = 0) {
  return two_hop_config(BackendKind::collective, ranks, hops, window);
}

TEST(RelaysOverEngines, AWindowBoundsEveryRoundAndAllTokensOfOneExpertPass) {
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
  const auto errors = run_hosts_with_engine(labels, watched, [&](const Rank& rank) {
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
TEST(RelaysOverEngines, WireCountsAreWhatTheEngineCarries) {
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
    const auto errors = run_hosts_with_engine(nodes.labels, counting, [&](const Rank& rank) {
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

// The engine of a relay fails between the hops: its host learns at once, the other one at the deadline.
TEST(RelaysOverEngines, ARelayThatFailsEndsEveryCallInTime) {
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
  run_hosts_with_engine({0, 0, 1, 1}, failing, body);
}

// Rank 0 stays in the first hop. Its node's other ranks wait for what it forwards.
TEST(RelaysOverEngines, ATimeoutNamesTheRelayThatIsLate) {
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
  for (const std::string& error : run_hosts_with_engine({0, 0, 1, 1}, staying, body)) EXPECT_EQ(error, "");
}

// A rank that does not call. Of the other host only a rank that is alone there is known to be the one.
TEST(RelaysOverEngines, ATimeoutNamesTheRankThatHasNotCalled) {
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
    run_hosts_with_engine({0, 0, 1}, [&](int rank) { return engine.functions(rank); }, body);
    EXPECT_EQ(timeouts, 2);
  }
}

}  // namespace
}  // namespace ferry::test
