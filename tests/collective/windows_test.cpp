// Two hops of the backend `cpu`: windows in shared memory, which do not grow with the tokens, and ranks that
// are late, leave or call their lanes in other orders.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "collective/two_hop_steps.hpp"
#include "ferry/ferry.hpp"
#include "repeats.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

Config windows_config(int ranks, int window) {
  return two_hop_config(BackendKind::cpu, ranks, Hops::two, window);
}

std::int64_t symmetric(const Sizes& sizes) {
  return sizes.dispatch_staging + sizes.combine_staging + sizes.signals;
}

TEST(Windows, DoNotGrowWithTheTokens) {
  const Topology topology({0, 1, 1, 2, 2, 2, 2, 2});
  for (const int window : {0, 1, 64}) {
    Config few = windows_config(8, window), many = few;
    few.max_tokens = 512;
    many.max_tokens = 4096;
    for (int rank = 0; rank < 8; ++rank) {
      const Sizes of_few = size_of(few, topology, rank), of_many = size_of(many, topology, rank);
      EXPECT_EQ(symmetric(of_few), symmetric(of_many)) << "window " << window;
      EXPECT_LT(6 * of_few.messages, of_many.messages) << "what grows is the rank's own";
    }
  }
}

// The largest message of a dispatch has a row of fp32, a head, and an id and a weight for each slot; a row of
// combine is about as large. Without a window: 4 MiB a lane.
TEST(Windows, HoldAsManyMessagesAsAreAskedFor) {
  const Topology topology({0, 0, 1, 1});
  Config config = windows_config(4, 64);
  config.lanes = 3;
  const std::int64_t largest = size_of(config, topology).dispatch_staging / (3 * 4 * 64);
  EXPECT_GE(largest, 4 * kHidden + 8 + 8 * config.top_k);
  EXPECT_LE(largest, 4 * kHidden + 64);
  config.window = 1;
  EXPECT_EQ(size_of(config, topology).dispatch_staging, 3 * 4 * ((largest + 63) / 64 * 64));
  config.window = 0;
  EXPECT_EQ(size_of(config, topology).dispatch_staging, 3 * (4 << 20));
}

TEST(Windows, OfMoreBytesThanCanBeAddressedAreRefused) {
  Config config = windows_config(4, 1 << 24);
  config.hidden = 1 << 24;
  config.max_tokens = 1;
  config.lanes = 64;
  try {
    size_of(config, Topology({0, 0, 1, 1}));
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("reduce window or lanes"), std::string::npos) << error.what();
  }
}

TEST(Windows, AllTokensOfOneExpertPass) {
  constexpr int kRanks = 5, kTokens = 4096;
  run_nodes(BackendKind::cpu, {0, 1, 0, 1, 1}, [&](const Rank& rank) {
    Config config = windows_config(kRanks, 64);
    config.max_tokens = kTokens;
    config.reduction = Reduction::partial;
    config.top_k = 1;
    Exchange exchange(rank, config);
    Inputs inputs(config, rank.index(), kTokens);
    std::fill(inputs.ids.begin(), inputs.ids.end(), 3);
    for (const Form form : {Form::fused, Form::together}) {
      const DispatchResult received = dispatch(exchange, inputs, form);
      FERRY_CHECK(*received.total == (rank.index() == 1 ? kRanks * kTokens : 0), "rows");
      std::vector<float> result;
      combine(exchange, received, {.data = received.data, .type = DType::fp32}, inputs, Reduction::partial,
              form, result);
      for (std::size_t i = 0; i < result.size(); i += 97)
        FERRY_CHECK(result[i] == inputs.tokens[i] * inputs.weights[i / kHidden], std::to_string(i));
    }
  });
}

// Every rank has sent on all lanes before any receives, and each receives them in another order.
TEST(Windows, LanesAreReceivedInAnyOrder) {
  constexpr int kLanes = 3, kRanks = 5;
  run_nodes(BackendKind::cpu, {0, 1, 1, 0, 2}, [&](const Rank& rank) {
    Config config = windows_config(kRanks, 1);
    config.lanes = kLanes;
    Exchange exchange(rank, config);
    std::vector<Inputs> inputs;
    for (int lane = 0; lane < kLanes; ++lane)
      inputs.emplace_back(config, rank.index() + kRanks * lane, config.max_tokens - lane);
    std::vector<std::vector<float>> results(kLanes);
    std::vector<DispatchResult> received(kLanes);
    const auto in_own_order = [&](const auto& receive) {
      rank.barrier();
      for (int i = 0; i < kLanes; ++i) receive((rank.index() + i) % kLanes);
    };
    for (int repeat = 0; repeat < 3; ++repeat) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const Inputs& mine = inputs[lane];
        exchange.dispatch_send(mine.given(), mine.ids.data(), mine.weights.data(), {.call = {.lane = lane}});
      }
      in_own_order([&](int lane) { received[lane] = exchange.dispatch_receive({.lane = lane}); });
      for (int lane = 0; lane < kLanes; ++lane) {
        results[lane].assign(inputs[lane].tokens.size(), -1);
        exchange.combine_send({.data = received[lane].data, .type = DType::fp32}, received[lane].plan,
                              {.data = results[lane].data(), .type = DType::fp32},
                              {.call = {.lane = lane}, .row_weights = received[lane].weight});
      }
      in_own_order([&](int lane) { exchange.combine_receive({.lane = lane}); });
      for (int lane = 0; lane < kLanes; ++lane) {
        const Inputs& mine = inputs[lane];
        for (std::size_t i = 0; i < results[lane].size(); ++i) {
          const std::size_t token = i / kHidden;
          float sum = 0;  // every expert returns its row; `exact` adds them in the order of the slots
          for (int slot = 0; slot < config.top_k; ++slot) {
            const std::size_t route = token * config.top_k + slot;
            if (mine.ids[route] >= 0) sum = std::fma(mine.weights[route], mine.tokens[i], sum);
          }
          FERRY_CHECK(results[lane][i] == sum, std::to_string(i));
        }
      }
    }
  });
}

// The others wait for it in the call. Its deadline is far away.
TEST(Windows, ARankThatLeavesIsLost) {
  std::atomic<int> lost = 0;
  const Stopwatch watch;
  run_nodes(BackendKind::cpu, {0, 0, 1, 1}, [&](const Rank& rank) {
    const Config config = windows_config(4, 7);
    Exchange exchange(rank, config);
    const Inputs inputs = inputs_of(config, rank.index());
    step(exchange, inputs, Form::phases);
    if (rank.index() == 2) return;
    try {
      dispatch(exchange, inputs, rank.index() == 0 ? Form::fused : Form::phases);
    } catch (const PeerLostError& error) {
      lost += error.record.peer == 2 && error.record.operation == Operation::dispatch;
    }
  });
  EXPECT_EQ(lost, 3);
  EXPECT_LT(watch.seconds(), 10);
}

// All ranks share the control block, so the missing rank is known wherever it is.
TEST(Windows, ATimeoutNamesTheRankThatHasNotCalled) {
  for (int missing = 0; missing < 3; ++missing) {
    std::atomic<int> timeouts = 0;
    run_nodes(BackendKind::cpu, {0, 0, 1}, [&](const Rank& rank) {
      Config config = windows_config(3, 1);
      config.deadline = 0.3;
      Exchange exchange(rank, config);
      if (rank.index() == missing) {
        while (timeouts < 2) sleep_seconds(0.001);
        return;
      }
      try {
        dispatch(exchange, inputs_of(config, rank.index()), Form::phases);
      } catch (const TimeoutError& error) {
        EXPECT_EQ(error.record.peer, missing) << error.what();
      }
      ++timeouts;
    });
    EXPECT_EQ(timeouts, 2);
  }
}

// A refusal is what the peers get, even if the rank that refused throws or leaves at once.
TEST(Windows, ARefusalWinsOverADeparture) {
  for (int repeat = 0; repeat < repeats(100); ++repeat) {
    const int refusing = repeat % 4;
    std::atomic<int> refused = 0;
    const auto body = [&](const Rank& rank) {
      const Config config = windows_config(4, 1);
      Exchange exchange(rank, config);
      Inputs inputs = inputs_of(config, rank.index());
      if (rank.index() == refusing) inputs.count = config.max_tokens + 1;
      try {
        dispatch(exchange, inputs, rank.index() % 2 == 0 ? Form::fused : Form::phases);
      } catch (const UsageError&) {
        ++refused;
        if (rank.index() == refusing && repeat % 8 >= 4) throw;
      }
    };
    try {
      Group::threads(Topology({0, 1, 1, 0})).run(body);
      EXPECT_LT(repeat % 8, 4);
    } catch (const UsageError&) {
      EXPECT_GE(repeat % 8, 4);
    }
    EXPECT_EQ(refused, 4) << "repeat " << repeat;
  }
}

}  // namespace
}  // namespace ferry::test
