// The engine `nccl`, from its construction to the end of its communicators.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "engine/nccl_ranks.hpp"
#include "engine/transfers.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "group/rank_state.hpp"

namespace ferry::test {
namespace {

// ---- The engine `nccl`, with a library that stands in for NCCL and moves host memory.

TEST(NcclEngine, MovesTheBytesOfEveryPairInHostAndDeviceMemory) {
  for (const int ranks : {1, 2, 3, 5}) {
    run_nccl(ranks, [&](const Rank& member, Engine& engine) {
      const int rank = member.index();
      EXPECT_EQ(engine.kind(), EngineKind::nccl);
      EXPECT_TRUE(engine.ordered_lanes() && engine.takes_device_memory());
      const auto lanes = engine.communicators(2);
      for (int round = 0; round < 10; ++round) {
        Communicator& host = *lanes[static_cast<std::size_t>(round % 2)];
        OnDevice device(host);
        const std::uint64_t number = seed() + static_cast<std::uint64_t>(round);
        exchange_random(host, rank, ranks, 5000, number);
        exchange_random(device, rank, ranks, 5000, number + 100);
      }
    });
  }
}

TEST(NcclEngine, ACheckThatThrowsAbortsTheTransferForGood) {
  const auto body = [](const Rank& rank, Engine& engine) {
    const auto lanes = engine.communicators(1);
    if (rank.index() == 1) return;  // never takes part
    const auto memory =
        std::make_shared<RankTransfer>(std::vector<std::vector<std::int64_t>>{{0, 8}, {8, 0}}, 0);
    int checks = 0;
    const auto give_up = [&] {
      if (++checks > 20) throw TimeoutError("the deadline of the test", {});
    };
    OnDevice device(*lanes[0]);
    EXPECT_THROW(device.all_to_all_v(memory->arguments(), memory, give_up), TimeoutError);
    EXPECT_THROW(device.all_to_all_v(memory->arguments(), memory, [] {}), TimeoutError);
  };
  run_nccl(2, body, 1);
}

TEST(NcclEngine, AnErrorOfNcclIsNamed) {
  const Setting failing("FAKE_NCCL_FAILS", "0");
  const auto body = [](const Rank& rank, Engine& engine) {
    const auto lanes = engine.communicators(1);
    const auto memory =
        std::make_shared<RankTransfer>(std::vector<std::vector<std::int64_t>>{{0, 8}, {8, 0}}, rank.index());
    if (rank.index() == 1) return;
    try {
      lanes[0]->all_to_all_v(memory->arguments(), memory, [] {});
      ADD_FAILURE() << "no error";
    } catch (const SystemError& error) {
      EXPECT_NE(std::string(error.what()).find("unhandled system error"), std::string::npos) << error.what();
    }
  };
  run_nccl(2, body, 1);
}

// A group of NCCL that stays open would take in what this thread sends on other communicators.
TEST(NcclEngine, ASendThatFailsEndsItsGroup) {
  setenv("FERRY_NCCL_LIBRARY", FERRY_FAKE_NCCL, 1);
  Group::threads(2).run([](Rank rank) {
    const std::shared_ptr<Engine> engines[] = {make_nccl_engine(rank.state(), 1.0, device_of(rank.index())),
                                               make_nccl_engine(rank.state(), 1.0, device_of(rank.index()))};
    const auto failing = engines[0]->communicators(1), working = engines[1]->communicators(1);
    if (rank.index() == 0) {
      const Setting fails("FAKE_NCCL_SEND_FAILS", "0");
      const auto memory =
          std::make_shared<RankTransfer>(std::vector<std::vector<std::int64_t>>{{0, 8}, {8, 0}}, 0);
      EXPECT_THROW(failing[0]->all_to_all_v(memory->arguments(), memory, [] {}), SystemError);
    }
    rank.barrier();
    exchange_random(*working[0], rank.index(), 2, 5000, seed());
  });
}

TEST(NcclEngine, RanksThatShareADeviceAreNamedWithIt) {
  setenv("FERRY_NCCL_LIBRARY", FERRY_FAKE_NCCL, 1);
  Group::threads(6).run([](Rank rank) {
    constexpr int kDevices[] = {0x1a, 1, 0x1a, 3, 1, 0x1a};
    const auto engine = make_nccl_engine(rank.state(), 10.0, device_of(kDevices[rank.index()]));
    try {
      engine->communicators(1);
      ADD_FAILURE() << "no error";
    } catch (const UnsupportedError& error) {
      const std::string text = error.what();
      for (const char* part : {"ranks 0, 2 and 5 share GPU-1a000000-0000-0000-0000-000000000000",
                               "ranks 1 and 4 share GPU-01000000-", "CUDA_VISIBLE_DEVICES"}) {
        EXPECT_NE(text.find(part), std::string::npos) << text;
      }
    }
  });
}

TEST(NcclEngine, AMissingLibraryIsNamedOnEveryRank) {
  setenv("FERRY_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
  Group::threads(2).run([](Rank rank) {
    const auto engine = make_nccl_engine(rank.state(), 10.0, device_of(rank.index()));
    try {
      engine->communicators(1);
      ADD_FAILURE() << "no error";
    } catch (const UnsupportedError& error) {
      EXPECT_NE(std::string(error.what()).find("/nowhere/libnccl.so.2"), std::string::npos) << error.what();
    }
  });
}

// ---- How communicators of the engine `nccl` end, and memory that is registered with NCCL.

constexpr int kRanks = 3;

// Calls of the stand-in since this was made.
class Calls {
 public:
  explicit Calls(const char* library = FERRY_FAKE_NCCL) : library_(library) {}

  int of(const char* what) const { return nccl_calls(what, library_) - before_.at(what); }

 private:
  std::map<std::string, int> counts() const {
    std::map<std::string, int> all;
    for (const char* what : {"finalize", "destroy", "abort", "register", "registered", "registered sends"})
      all[what] = nccl_calls(what, library_);
    return all;
  }

  const char* library_;
  std::map<std::string, int> before_ = counts();
};

// Messages between memory of the device that each rank has registered, or not.
void exchange_on_device(Communicator& lane, int rank, bool registered) {
  Random random(seed());
  const auto transfer = std::make_shared<RankTransfer>(random_sizes(kRanks, 500, random), rank);
  std::shared_ptr<void> sent, received;
  if (registered) {
    sent = lane.register_memory(transfer->send.data(), static_cast<std::int64_t>(transfer->send.size()));
    received =
        lane.register_memory(transfer->receive.data(), static_cast<std::int64_t>(transfer->receive.size()));
  }
  transfer->fill(seed());
  OnDevice(lane).all_to_all_v(transfer->arguments(), transfer, no_check);
  transfer->check(seed());
}

TEST(NcclEnd, HealthyCommunicatorsAreFinalizedAndDestroyed) {
  const Calls calls;
  run_nccl(kRanks, [](const Rank& rank, Engine& engine) {
    const auto lanes = engine.communicators(2);
    for (const auto& lane : lanes) exchange_random(*lane, rank.index(), kRanks, 500, seed());
  });
  EXPECT_EQ(calls.of("finalize"), kRanks);
  EXPECT_EQ(calls.of("destroy"), kRanks);
  EXPECT_EQ(calls.of("abort"), 0);
}

// It may still work with the memory of the others.
TEST(NcclEnd, ARankThatEndsWaitsForTheOthers) {
  const Calls calls;
  run_nccl(kRanks, [](const Rank& rank, Engine& engine) {
    auto lanes = engine.communicators(1);
    if (rank.index() == 1) sleep_seconds(0.3);
    const Stopwatch watch;
    lanes.clear();
    if (rank.index() != 1) {
      EXPECT_GT(watch.seconds(), 0.1);
    }
  });
  EXPECT_EQ(calls.of("destroy"), kRanks);
}

// A wait of the peers for this rank is longer: it ends after half the deadline.
TEST(NcclEnd, ACommunicatorThatAPeerKeepsIsAborted) {
  constexpr double kShort = 1;
  const Calls calls;
  const auto body = [&](const Rank& rank, Engine& engine) {
    auto lanes = engine.communicators(1);
    if (rank.index() != 1) {
      const Stopwatch watch;
      lanes.clear();
      EXPECT_GT(watch.seconds(), 0.4 * kShort);
      EXPECT_LT(watch.seconds(), 0.9 * kShort);
    }
    rank.barrier();
    if (rank.index() == 1) {
      EXPECT_EQ(calls.of("abort"), kRanks - 1);
    }
  };
  run_nccl(kRanks, body, kShort);
  // When rank 1 ends its own at last, all have.
  EXPECT_EQ(calls.of("destroy"), 1);
}

TEST(NcclEnd, AFailureOfTheGroupAborts) {
  const Calls calls;
  const auto body = [](const Rank& rank, Engine& engine) {
    const auto lanes = engine.communicators(1);
    if (rank.index() == 1) throw std::runtime_error("enough");
    while (!rank.state().control().failed()) sleep_seconds(0.001);
  };
  EXPECT_THROW(run_nccl(kRanks, body), std::runtime_error);
  EXPECT_EQ(calls.of("destroy"), 0);
  EXPECT_EQ(calls.of("abort"), kRanks);
}

TEST(NcclEnd, ACommunicatorThatCannotBeFinalizedIsAborted) {
  const Setting fails("FAKE_NCCL_FINALIZE_FAILS", "2");
  const Calls calls;
  run_nccl(kRanks, [](const Rank&, Engine& engine) { engine.communicators(1); });
  EXPECT_EQ(calls.of("destroy"), kRanks - 1);
  EXPECT_EQ(calls.of("abort"), 1);
}

TEST(NcclRegistration, IsUsedIfAllRanksAskForIt) {
  const Setting asks("FERRY_NCCL_REGISTER", "1");
  const Calls calls;
  run_nccl(kRanks, [](const Rank& rank, Engine& engine) {
    const auto lanes = engine.communicators(2);
    for (int round = 0; round < 3; ++round) exchange_on_device(*lanes[0], rank.index(), true);
  });
  EXPECT_EQ(calls.of("register"), kRanks * 3 * 2);
  EXPECT_GT(calls.of("registered sends"), 0);
  EXPECT_EQ(calls.of("registered"), 0);
  EXPECT_EQ(calls.of("destroy"), kRanks);
}

TEST(NcclRegistration, IsLeftOutIfNobodyAsksOrTheLibraryHasNone) {
  const auto body = [](const Rank& rank, Engine& engine) {
    const auto lanes = engine.communicators(1);
    exchange_on_device(*lanes[0], rank.index(), true);
  };
  const Calls calls, calls_2_18(FERRY_FAKE_NCCL_2_18);
  run_nccl(kRanks, body);
  const Setting asks("FERRY_NCCL_REGISTER", "1");
  run_nccl(kRanks, body, 10, FERRY_FAKE_NCCL_2_18);
  for (const Calls* each : {&calls, &calls_2_18}) {
    EXPECT_EQ(each->of("register"), 0);
    EXPECT_EQ(each->of("destroy"), kRanks);
  }
}

TEST(NcclRegistration, AnErrorIsNamed) {
  const Setting asks("FERRY_NCCL_REGISTER", "1"), fails("FAKE_NCCL_REGISTER_FAILS", "1");
  run_nccl(kRanks, [](const Rank& rank, Engine& engine) {
    const auto lanes = engine.communicators(1);
    std::vector<std::byte> memory(64);
    if (rank.index() != 1) return;
    try {
      lanes[0]->register_memory(memory.data(), 64);
      ADD_FAILURE() << "no error";
    } catch (const SystemError& error) {
      EXPECT_NE(std::string(error.what()).find("ncclCommRegister failed: unhandled"), std::string::npos)
          << error.what();
    }
  });
}

// NCCL has freed what it knew of the memory with the communicator.
TEST(NcclRegistration, EndsWithACommunicatorThatHasFailed) {
  const Setting asks("FERRY_NCCL_REGISTER", "1");
  const Calls calls;
  const auto body = [](const Rank& rank, Engine& engine) {
    const auto lanes = engine.communicators(1);
    std::vector<std::byte> memory(64);
    const std::shared_ptr<void> registration = lanes[0]->register_memory(memory.data(), 64);
    if (rank.index() != 0) return;
    const auto transfer =
        std::make_shared<RankTransfer>(TransferSizes{{0, 8, 8}, {8, 0, 0}, {8, 0, 0}}, rank.index());
    const auto give_up = [] { throw TimeoutError("the deadline of the test", {}); };
    EXPECT_THROW(OnDevice(*lanes[0]).all_to_all_v(transfer->arguments(), transfer, give_up), TimeoutError);
  };
  run_nccl(kRanks, body, 0.5);
  EXPECT_EQ(calls.of("registered"), 0);
  EXPECT_GE(calls.of("abort"), 1);
}

}  // namespace
}  // namespace ferry::test
