// NVSHMEM started by a group, its heap, and the transport over it: messages through windows between ranks
// that are processes. Ranks share a GPU only under MPS, whose daemon CUDA_MPS_PIPE_DIRECTORY names.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/nvshmem/session.hpp"
#include "cuda/nvshmem/message_checks.hpp"
#include "exchange/configuration.hpp"
#include "harness/check.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

constexpr double kDeadline = 8;  // seconds; the runner allows 30

// Ranks of two are a node.
bool other_node(const Rank& rank, int peer) {
  return peer / 2 != rank.index() / 2;
}

class Nvshmem : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    FERRY_SKIP_WITHOUT_DEVICES(1);
    if (GetParam() > device_count() && std::getenv("CUDA_MPS_PIPE_DIRECTORY") == nullptr)
      GTEST_SKIP() << GetParam() << " ranks on " << device_count() << " GPU(s) need MPS";
    // In a process of its own: ranks are forked from this one.
    if (run_process([] { nvshmem::load_module(); }) != 0) GTEST_SKIP() << "there is no NVSHMEM, or no module";
  }

  void run(const std::function<void(Rank)>& body) {
    run_ranks(GroupKind::processes, GetParam(), kDeadline, [&](const Rank& rank) {
      cuda::check(cudaSetDevice(rank.index() % device_count()), "set the device");
      body(rank);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Nvshmem, testing::Values(2, 4),
                         [](const auto& test) { return std::to_string(test.param); });

TEST_P(Nvshmem, MessagesPassThroughWindowsOfAnySize) {
  run([](const Rank& rank) {
    Session session(rank, kDeadline);
    for (const int window : {1, 7, 64}) {
      Checks checks(rank, session, {rank.size(), 2, window, 1040});
      const auto everyone = [](int) { return true; };
      const auto nobody = [](int) { return false; };
      const auto nodes = [&](int peer) { return other_node(rank, peer); };
      const int blocks = blocks_of({rank.size(), 2, window, 1040});
      const std::array<Found, 3> found{checks.run(300, true, blocks, 2, everyone),
                                       checks.run(300, true, blocks, 2, nodes),
                                       checks.run(300, true, blocks, 2, nobody)};
      for (std::size_t i = 0; i < found.size(); ++i) {
        FERRY_CHECK(found[i].ended == 0 && found[i].wrong == 0,
                    str("window ", window, ", run ", i, ": ", found[i].ended, " warps ended early, ",
                        found[i].wrong, " words differ"));
      }
    }
  });
}

TEST_P(Nvshmem, TakesPartInWhatTheProgramHasStarted) {
  run([](const Rank& rank) {
    const nvshmem::Module& module = nvshmem::load_module();
    std::array<std::byte, nvshmem::kIdBytes> mine{};
    if (rank.index() == 0) FERRY_CHECK(module.make_id(mine.data()) == 0, "make the id");
    std::vector<std::array<std::byte, nvshmem::kIdBytes>> all(static_cast<std::size_t>(rank.size()));
    rank.all_gather(mine.data(), all.data(), mine.size());
    // The PEs in another order than the ranks.
    FERRY_CHECK(module.start(rank.size() - 1 - rank.index(), rank.size(), all[0].data()) == 0, "start");
    Session session(rank, kDeadline);
    FERRY_CHECK(session.started_by_program(), "the program has started NVSHMEM");
    FERRY_CHECK(session.pe_of(0) == rank.size() - 1, "the PE of rank 0");
    const cuda::MessageCheckLayout layout{rank.size(), 1, 4, 4096};
    Checks checks(rank, session, layout);
    const Found found = checks.run(100, true, blocks_of(layout), 2, [](int) { return true; });
    FERRY_CHECK(found.ended == 0 && found.wrong == 0, "messages");
    FERRY_CHECK(module.is_running(), "still running");
  });
}

TEST_P(Nvshmem, MemoryIsUsedAgainOnceAllRanksHaveReleasedIt) {
  run([](const Rank& rank) {
    const std::byte* first = nullptr;
    for (int round = 0; round < 3; ++round) {
      Session session(rank, kDeadline);
      FERRY_CHECK(!session.started_by_program(), "Ferry has started NVSHMEM");
      HeapMemory memory = session.allocate(100'000);
      if (round == 0) first = memory.data();
      FERRY_CHECK(memory.data() == first, "the same memory");
      std::vector<std::byte> bytes(100'000, std::byte{7});
      copy_bytes(bytes.data(), memory.data(), bytes.size());
      for (const std::byte each : bytes) FERRY_CHECK(each == std::byte{0}, "zeroed");
      std::memset(bytes.data(), 5, bytes.size());
      copy_bytes(memory.data(), bytes.data(), bytes.size());
      FERRY_CHECK(session.allocate(50'000).data() != first, "other memory");
    }
  });
}

TEST_P(Nvshmem, AMissingRankEndsTheWaitsAndNvshmemIsNotUsedAgain) {
  run([](const Rank& rank) {
    Session session(rank, kDeadline);
    const cuda::MessageCheckLayout layout{rank.size(), 1, 4, 1024};
    Checks checks(rank, session, layout);
    // The last rank sends fewer messages than the others wait for.
    const std::int64_t messages = rank.index() == rank.size() - 1 ? 20 : 50;
    const Found found = checks.run(messages, true, blocks_of(layout), 0.5, [](int) { return true; });
    if (rank.index() != rank.size() - 1) {
      FERRY_CHECK(found.ended > 0, "waits for the last rank end");
      const std::optional<WaitRecord> record = cuda::timeout_of(checks.report(), kFirstEpoch);
      FERRY_CHECK(record && record->rank == rank.index(), "the record of the wait");
    }
    rank.barrier();
    Session::note_failure();
    const auto error = expect_thrown<UnsupportedError>([&] { Session(rank, kDeadline); });
    require_text(error, "NVSHMEM is not used again");
    const DeviceMemory usable(1000);  // CUDA is
  });
}

// A measurement, printed: puts of whole bf16 rows of 7,168 columns in both directions, with 24 blocks.
TEST_P(Nvshmem, RateOfPutsNextToPlainStores) {
  run([](const Rank& rank) {
    Session session(rank, kDeadline);
    const int channels = 24 * 8 / (2 * (rank.size() - 1));
    const cuda::MessageCheckLayout layout{rank.size(), channels, 8, 14336};
    Checks checks(rank, session, layout);
    for (const bool put : {true, false}) {
      Found found{};
      for (int round = 0; round < 3; ++round)
        found = checks.run(400, false, blocks_of(layout), 4, [&](int) { return put; });
      FERRY_CHECK(found.ended == 0, "messages");
      const double bytes = 400.0 * channels * (rank.size() - 1) * layout.bytes;
      if (rank.index() == 0)
        std::printf("%s: %.1f GB/s out of each of %d ranks, %d blocks\n", put ? "puts" : "plain stores",
                    bytes / found.milliseconds / 1e6, rank.size(), blocks_of(layout));
    }
  });
}

TEST(NvshmemWithoutGpu, RanksThatAreThreadsAreRefused) {
  Group::threads(2).run([](const Rank& rank) {
    const auto error = expect_thrown<UnsupportedError>([&] { Session(rank, kDeadline); });
    require_text(error, "start the ranks as processes");
  });
}

#ifdef FERRY_TEST_HAS_NVSHMEM
TEST(NvshmemWithoutGpu, TheModuleOpens) {
  const nvshmem::Module& module = nvshmem::load_module();
  int major = 0, minor = 0, patch = 0;
  module.version(&major, &minor, &patch);
  EXPECT_EQ(major, 3);
  EXPECT_FALSE(module.is_running());
}

// Ranks are processes on simulated hosts. In the second run rank 1 does not find the module.
TEST(NvshmemWithoutGpu, TheAutomaticBackendNeedsTheModuleOnEveryRank) {
  for (const bool missing : {false, true}) {
    const TestBootstrap meeting(2);
    run_ranks(GroupKind::processes, 2, kDeadline, [&](const Rank& process) {
      if (missing && process.index() == 1) setenv("FERRY_NVSHMEM_MODULE", "/nowhere/module.so", 1);
      Bootstrap bootstrap = meeting.bootstrap(process.index());
      bootstrap.host_id = std::to_string(process.index());
      Group::custom(bootstrap).run([&](const Rank& rank) {
        const Config config{
            .experts = 2, .top_k = 1, .hidden = 16, .max_tokens = 1, .memory = MemoryKind::device};
        try {
          const Config chosen = agree_on_config(rank, config);
          contract::require(chosen.backend == (missing ? BackendKind::collective : BackendKind::nvshmem),
                            "backend ", to_string(chosen.backend));
          contract::require(chosen.engine == (missing ? EngineKind::nccl : EngineKind::automatic), "engine ",
                            to_string(chosen.engine));
        } catch (const UnsupportedError& error) {  // there is no NCCL either
          contract::require(missing, error.what());
          require_text(error, "nvshmem: rank 1: ");
          require_text(error, "/nowhere/module.so does not exist");
        }
      });
    });
  }
}
#endif

TEST(NvshmemWithoutGpu, AMissingModuleIsNamed) {
  const int status = run_process([] {
    setenv("FERRY_NVSHMEM_MODULE", "/nowhere/module.so", 1);
    const auto error = expect_thrown<UnsupportedError>([] { nvshmem::open_module(); });
    require_text(error, "/nowhere/module.so does not exist");
  });
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace ferry::test
