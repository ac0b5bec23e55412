// Symmetric memory: peers read what a rank writes, and no file, descriptor or mapping leaks.
#include "memory/symmetric_memory.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/mapping.hpp"
#include "own_shared_folder.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

namespace fs = std::filesystem;

class SymmetricMemories : public testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, SymmetricMemories, testing::ValuesIn(kGroupKinds),
                         [](const auto& kind) { return name(kind.param); });

long count_entries(const fs::path& directory) {
  return std::distance(fs::directory_iterator(directory), fs::directory_iterator());
}

long count_mappings() {
  std::ifstream maps("/proc/self/maps");
  long lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return lines;
}

TEST_P(SymmetricMemories, StartAsZeroAndCarryWritesToPeers) {
  run_ranks(GetParam(), 4, kNoFaultDeadline, [](const Rank& rank) {
    constexpr std::int64_t kPart = 100000;
    SymmetricMemory memory(rank, rank.size() * kPart);
    for (std::int64_t i = 0; i < memory.bytes(); ++i)
      FERRY_CHECK(*memory.mine(i) == std::byte{0}, str("byte ", i));
    rank.barrier();
    for (int peer = 0; peer < rank.size(); ++peer) {
      std::memset(memory.at(peer, rank.index() * kPart), 16 * rank.index() + peer + 1, kPart);
    }
    rank.barrier();
    for (int peer = 0; peer < rank.size(); ++peer) {
      const std::byte expected{static_cast<unsigned char>(16 * peer + rank.index() + 1)};
      for (std::int64_t i = 0; i < kPart; ++i)
        FERRY_CHECK(*memory.mine(peer * kPart + i) == expected, str("byte ", i));
    }
  });
}

TEST_P(SymmetricMemories, RequireTheSameSizeOnEveryRank) {
  run_ranks(GetParam(), 3, kNoFaultDeadline, [](const Rank& rank) {
    const auto error =
        expect_thrown<UsageError>([&] { SymmetricMemory(rank, rank.index() == 1 ? 128 : 64); });
    require_text(error, "rank 0 asks for 64 bytes, rank 1 for 128");
    SymmetricMemory(rank, 64);
  });
}

TEST_P(SymmetricMemories, ThatCannotBeAllocatedThrowOnEveryRank) {
  run_ranks(GetParam(), 3, kNoFaultDeadline, [](const Rank& rank) {
    const auto error = expect_thrown<SystemError>([&] { SymmetricMemory(rank, std::int64_t{1} << 55); });
    require_text(error, str(std::int64_t{1} << 55, " bytes"));
    SymmetricMemory(rank, 64);
  });
}

TEST_P(SymmetricMemories, StayUsableAfterTheirOwnerHasLeft) {
  run_ranks(GetParam(), 3, kNoFaultDeadline, [](const Rank& rank) {
    constexpr std::int64_t kPart = 300000;
    SymmetricMemory memory(rank, 3 * kPart);
    if (rank.index() == 0) return;
    sleep_seconds(0.1);
    std::memset(memory.at(0, rank.index() * kPart), 1, kPart);
  });
}

// A file that shrinks under a mapping makes accesses end the process with SIGBUS.
TEST(SharedFiles, CannotBeShrunkByARank) {
  unsetenv("FERRY_SHM_DIR");
  SharedFile file(100000);
  const FileDescriptor received(fcntl(file.descriptor().number(), F_DUPFD_CLOEXEC, 0));
  const Mapping mapping = Mapping::file(received.number(), 100000);
  for (const off_t size : {0, 4096, 200000}) {
    EXPECT_EQ(ftruncate(received.number(), size), -1);
    EXPECT_EQ(errno, EPERM);
  }
  mapping.data()[99999] = std::byte{1};
  EXPECT_EQ(file.take_mapping().data()[99999], std::byte{1});
}

TEST(SharedFiles, ThatExceedTheMemoryAreRefused) {
  unsetenv("FERRY_SHM_DIR");
  try {
    SharedFile(std::int64_t{1} << 46);
    FAIL() << "nothing was thrown";
  } catch (const SystemError& error) {
    EXPECT_NE(std::string(error.what()).find(str(std::int64_t{1} << 46, " bytes needed, ")),
              std::string::npos)
        << error.what();
  }
}

TEST_P(SymmetricMemories, LeakNothing) {
  const OwnSharedFolder folder;
  run_ranks(GetParam(), 3, kNoFaultDeadline, [](const Rank& rank) {
    const auto round = [&] {
      TestLane lane(rank, kNoFaultDeadline);
      LocalMemory local(1 << 16);
      *local.data() = std::byte{1};
      lane.exchange();
    };
    for (int i = 0; i < 20; ++i) round();
    rank.barrier();
    const long descriptors_before = count_entries("/proc/self/fd"), mappings_before = count_mappings();
    rank.barrier();
    for (int i = 0; i < 1000; ++i) round();
    rank.barrier();
    // Not exact: other threads of this process count at the same moment, and a rank opens a pidfd for each
    // peer it had to wait for.
    constexpr int kSlack = 8;
    FERRY_CHECK(count_entries("/proc/self/fd") <= descriptors_before + kSlack,
                str(descriptors_before, " descriptors before"));
    FERRY_CHECK(count_mappings() <= mappings_before + kSlack, str(mappings_before, " mappings before"));
    rank.barrier();
  });
  EXPECT_TRUE(folder.empty());
}

TEST(LocalMemory, IsZeroAndRefusesAnImpossibleSize) {
  const LocalMemory memory(1000);
  EXPECT_EQ(memory.bytes(), 1000);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(memory.data()[i], std::byte{0});
  EXPECT_THROW(LocalMemory(std::int64_t{1} << 60), SystemError);
}

}  // namespace
}  // namespace ferry::test
