// The engine `nccl`, with a library that stands in for NCCL and moves host memory.
#include <gtest/gtest.h>

#include <cstdlib>

#include "engine/nccl_ranks.hpp"
#include "engine/transfers.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"

namespace ferry::test {
namespace {

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

}  // namespace
}  // namespace ferry::test
