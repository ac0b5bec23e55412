// Two hops on every backend that has them: what the contract suite on simulated nodes does not reach.
// Windows, calls in phases, refusals.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "collective/two_hop_steps.hpp"
#include "ferry/ferry.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

using TwoHops = testing::TestWithParam<BackendKind>;

// The outcome of every rank in one hop, in fused calls.
std::vector<Outcome> in_one_hop(BackendKind backend, const std::vector<int>& labels, ReductionLevel level) {
  std::vector<Outcome> outcomes(labels.size());
  run_nodes(backend, labels, [&](const Rank& rank) {
    const Config config = two_hop_config(backend, rank.size(), Hops::one, 0, level);
    Exchange exchange(rank, config);
    outcomes[static_cast<std::size_t>(rank.index())] =
        step(exchange, inputs_of(config, rank.index()), Form::fused);
  });
  return outcomes;
}

TEST_P(TwoHops, DeliverTheBytesOfOneHopInAnyWindowAndForm) {
  for (const Nodes& nodes : kNodes) {
    const std::vector<Outcome> by_rank = in_one_hop(GetParam(), nodes.labels, ReductionLevel::rank);
    const std::vector<Outcome> by_node = in_one_hop(GetParam(), nodes.labels, ReductionLevel::node);
    const std::vector<Outcome> on_one_host =
        in_one_hop(GetParam(), std::vector<int>(nodes.labels.size()), ReductionLevel::rank);
    for (std::size_t rank = 0; rank < nodes.labels.size(); ++rank)
      EXPECT_TRUE(by_node[rank].exact == on_one_host[rank].exact) << nodes.name << ", rank " << rank;
    run_nodes(GetParam(), nodes.labels, [&](const Rank& rank) {
      for (const int window : {0, 1, 7, 64}) {
        const ReductionLevel level = window % 2 == 0 ? ReductionLevel::node : ReductionLevel::rank;
        const std::vector<Outcome>& expected = level == ReductionLevel::node ? by_node : by_rank;
        const Config config = two_hop_config(GetParam(), rank.size(), Hops::two, window, level);
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

// Weights and values are words: a relay neither adds them nor looks at them.
TEST_P(TwoHops, RouteValuesKeepEveryBit) {
  struct Case {
    Reduction reduction;
    ReductionLevel level;
  };
  for (const auto& [reduction, level] : {Case{Reduction::partial, ReductionLevel::rank},
                                         {Reduction::partial, ReductionLevel::node},
                                         {Reduction::exact, ReductionLevel::node}}) {
    run_nodes(GetParam(), {0, 1, 1, 0, 0}, [&, reduction = reduction, level = level](const Rank& rank) {
      const Config config = two_hop_config(GetParam(), 5, Hops::two, 7, level);
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
      const std::vector<float> beside_rows = std::exchange(back, std::vector<float>(back.size(), -1.0f));
      exchange.return_values(rows.data(), received.plan, back.data());
      EXPECT_EQ(std::memcmp(back.data(), beside_rows.data(), 4 * back.size()), 0);
    });
  }
}

// Its relay's part of the call is done by a thread, for peers that are late, while it destroys the exchange.
TEST_P(TwoHops, ARankMayEndItsExchangeBetweenThePhases) {
  for (int ending = 0; ending < 4; ++ending) {
    for (const bool combining : {false, true}) {
      run_nodes(GetParam(), {0, 0, 1, 1}, [&](const Rank& rank) {
        const Config config = two_hop_config(GetParam(), 4, Hops::two, 1);
        Exchange exchange(rank, config);
        const Inputs inputs = inputs_of(config, rank.index());
        const bool ends = rank.index() == ending;
        const DispatchResult received = [&] {
          if (combining || !ends) {
            if (!combining) sleep_seconds(0.02);
            return dispatch(exchange, inputs, Form::fused);
          }
          exchange.dispatch_send(inputs.given(), inputs.ids.data(), inputs.weights.data());
          return DispatchResult();
        }();
        if (!combining) return;
        const Outputs outputs{.data = received.data, .type = DType::fp32};
        std::vector<float> result(inputs.tokens.size());
        if (!ends) sleep_seconds(0.02);
        exchange.combine_send(outputs, received.plan, {.data = result.data(), .type = DType::fp32},
                              {.row_weights = received.weight});
        if (!ends) exchange.combine_receive();
      });
    }
  }
}

TEST_P(TwoHops, ARefusalEndsTheCallOnEveryRank) {
  run_nodes(GetParam(), {0, 0, 1, 1}, [&](const Rank& rank) {
    const Config config = two_hop_config(GetParam(), 4, Hops::two, 7);
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

TEST_P(TwoHops, OtherOptionsOfARankAreRefusedOnEveryRank) {
  run_nodes(GetParam(), {0, 0, 1, 1}, [&](const Rank& rank) {
    const Config config = two_hop_config(GetParam(), 4, Hops::two, 1);
    Exchange exchange(rank, config);
    const Inputs inputs = inputs_of(config, rank.index());
    for (int other = 0; other < 4; ++other) {
      const Form form = (rank.index() + other) % 2 == 0 ? Form::fused : Form::phases;
      const DispatchResult received = dispatch(exchange, inputs, form);
      const Outputs outputs{.data = received.data, .type = DType::fp32};
      std::vector<float> result;
      const Reduction reduction = rank.index() == other ? Reduction::exact : Reduction::partial;
      try {
        combine(exchange, received, outputs, inputs, reduction, form, result);
        ADD_FAILURE() << "rank " << rank.index() << ": accepted";
      } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what()).find("reduction"), std::string::npos) << error.what();
      }
      step(exchange, inputs, form);
    }
  });
}

TEST_P(TwoHops, OtherHopsOrWindowsOfARankAreRefused) {
  run_nodes(GetParam(), {0, 0, 1, 1}, [&](const Rank& rank) {
    const auto expect_refused = [&](const Config& config, const char* difference) {
      try {
        const Exchange exchange(rank, config);
        ADD_FAILURE() << "rank " << rank.index() << ": accepted";
      } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what()).find(difference), std::string::npos) << error.what();
      }
    };
    const bool other = rank.index() == 2;
    expect_refused(two_hop_config(GetParam(), 4, other ? Hops::one : Hops::two),
                   "hops is two on rank 0 and one on rank 2");
    expect_refused(two_hop_config(GetParam(), 4, Hops::two, other ? 7 : 64),
                   "window is 64 on rank 0 and 7 on rank 2");
    const Config config = two_hop_config(GetParam(), 4, Hops::two);
    Exchange exchange(rank, config);  // the group goes on
    step(exchange, inputs_of(config, rank.index()), Form::fused);
  });
}

// The first call waits for the rank that has left; the second one finds that the group has failed.
TEST(TwoHopsOfThreads, EveryCallOfAFailedGroupNamesTheNodeOfTheLostRank) {
  run_nodes(BackendKind::cpu, {0, 1, 1}, [](const Rank& rank) {
    const Config config = two_hop_config(BackendKind::cpu, rank.size(), Hops::two);
    Exchange exchange(rank, config);
    const Inputs inputs = inputs_of(config, rank.index());
    dispatch(exchange, inputs, Form::fused);
    if (rank.index() == 1) return;
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        dispatch(exchange, inputs, Form::fused);
        ADD_FAILURE() << "a call without rank 1 has ended well";
      } catch (const PeerLostError& error) {
        EXPECT_EQ(error.record.peer, 1) << error.what();
        EXPECT_EQ(error.record.node, 1) << error.what();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, TwoHops, testing::Values(BackendKind::collective, BackendKind::cpu),
                         [](const auto& test) { return std::string(to_string(test.param)); });

}  // namespace
}  // namespace ferry::test
