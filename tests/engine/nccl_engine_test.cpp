// The engine `nccl`, with a library that stands in for NCCL and moves host memory.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "engine/nccl_engine.hpp"
#include "engine/transfers.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"

namespace ferry::test {
namespace {

// Streams of host memory, as fake_nccl.cpp takes them. Never freed, because abandoned transfers use them.
std::atomic<int>* new_stream() {
  static auto* const mutex = new std::mutex;
  static auto* const streams = new std::deque<std::atomic<int>>;
  const std::lock_guard lock(*mutex);
  return &streams->emplace_back(0);
}

class HostStream final : public DeviceStream {
 public:
  void* handle() const override { return pending_; }
  std::byte* memory(std::int64_t bytes) override {
    if (memory_.size() < static_cast<std::size_t>(bytes)) memory_.resize(static_cast<std::size_t>(bytes));
    return memory_.data();
  }
  void copy(void* to, const void* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void wait(const std::function<void()>& check) override {
    while (*pending_ > 0) {
      check();
      std::this_thread::yield();
    }
  }

 private:
  std::atomic<int>* const pending_ = new_stream();
  std::vector<std::byte> memory_;
};

DeviceAccess device_of(int number) {
  DeviceId id{};
  id[0] = static_cast<std::byte>(number);
  return {.id = id, .make_stream = [] { return std::make_unique<HostStream>(); }};
}

// Runs `body(rank, engine)` with an engine for each rank, on devices of their own.
void run_nccl(int ranks, const std::function<void(int rank, Engine& engine)>& body) {
  setenv("FERRY_NCCL_LIBRARY", FERRY_FAKE_NCCL, 1);
  Group::threads(ranks).run([&](Rank rank) {
    const std::unique_ptr<Engine> engine = make_nccl_engine(rank, 10.0, device_of(rank.index()));
    body(rank.index(), *engine);
  });
}

// Device memory, which here is host memory too.
class OnDevice final : public Communicator {
 public:
  explicit OnDevice(Communicator& communicator) : communicator_(communicator) {}

  void all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>& keep,
                    const std::function<void()>& check) override {
    AllToAllV on_device = transfer;
    on_device.device = true;
    communicator_.all_to_all_v(on_device, keep, check);
  }

 private:
  Communicator& communicator_;
};

TEST(NcclEngine, MovesTheBytesOfEveryPairInHostAndDeviceMemory) {
  for (const int ranks : {1, 2, 3, 5}) {
    run_nccl(ranks, [&](int rank, Engine& engine) {
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
  run_nccl(2, [](int rank, Engine& engine) {
    const auto lanes = engine.communicators(1);
    if (rank == 1) return;  // never takes part
    const auto memory =
        std::make_shared<RankTransfer>(std::vector<std::vector<std::int64_t>>{{0, 8}, {8, 0}}, 0);
    int checks = 0;
    const auto give_up = [&] {
      if (++checks > 20) throw TimeoutError("the deadline of the test", {});
    };
    OnDevice device(*lanes[0]);
    EXPECT_THROW(device.all_to_all_v(memory->arguments(), memory, give_up), TimeoutError);
    EXPECT_THROW(device.all_to_all_v(memory->arguments(), memory, [] {}), TimeoutError);
  });
}

TEST(NcclEngine, AnErrorOfNcclIsNamed) {
  setenv("FAKE_NCCL_FAILS", "0", 1);
  run_nccl(2, [](int rank, Engine& engine) {
    const auto lanes = engine.communicators(1);
    const auto memory =
        std::make_shared<RankTransfer>(std::vector<std::vector<std::int64_t>>{{0, 8}, {8, 0}}, rank);
    if (rank == 1) return;
    try {
      lanes[0]->all_to_all_v(memory->arguments(), memory, [] {});
      ADD_FAILURE() << "no error";
    } catch (const SystemError& error) {
      EXPECT_NE(std::string(error.what()).find("unhandled system error"), std::string::npos) << error.what();
    }
  });
}

TEST(NcclEngine, RanksThatShareADeviceAreNamed) {
  setenv("FERRY_NCCL_LIBRARY", FERRY_FAKE_NCCL, 1);
  Group::threads(3).run([](Rank rank) {
    const auto engine = make_nccl_engine(rank, 10.0, device_of(rank.index() == 2 ? 0 : rank.index()));
    try {
      engine->communicators(1);
      ADD_FAILURE() << "no error";
    } catch (const UnsupportedError& error) {
      EXPECT_NE(std::string(error.what()).find("ranks 0 and 2 share one"), std::string::npos) << error.what();
    }
  });
}

TEST(NcclEngine, AMissingLibraryIsNamedOnEveryRank) {
  setenv("FERRY_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
  Group::threads(2).run([](Rank rank) {
    const auto engine = make_nccl_engine(rank, 10.0, device_of(rank.index()));
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
