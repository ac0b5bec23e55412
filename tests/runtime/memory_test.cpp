// Symmetric memory: what is written to a peer arrives there, and nothing is left behind.
#include "memory/symmetric_memory.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "memory/local_memory.hpp"
#include "own_shared_folder.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/group_kinds.hpp"

namespace ferry::test {
namespace {

namespace fs = std::filesystem;

class Memory : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, Memory, testing::ValuesIn(kKinds),
                         [](const auto& kind) { return name(kind.param); });

long entries_of(const fs::path& directory) {
  return std::distance(fs::directory_iterator(directory), fs::directory_iterator());
}

long mappings() {
  std::ifstream maps("/proc/self/maps");
  long lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return lines;
}

TEST_P(Memory, IsZeroAndCarriesWrites) {
  run_ranks(GetParam(), 4, kPatience, [](const Rank& rank) {
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
      const std::byte wanted{static_cast<unsigned char>(16 * peer + rank.index() + 1)};
      for (std::int64_t i = 0; i < kPart; ++i)
        FERRY_CHECK(*memory.mine(peer * kPart + i) == wanted, str("byte ", i));
    }
  });
}

TEST_P(Memory, HasOneSize) {
  run_ranks(GetParam(), 3, kPatience, [](const Rank& rank) {
    const auto error = thrown<UsageError>([&] { SymmetricMemory(rank, rank.index() == 1 ? 128 : 64); });
    check_text(error, "rank 0 asks for 64 bytes, rank 1 for 128");
    SymmetricMemory(rank, 64);
  });
}

TEST_P(Memory, ThatNoRankCanHaveIsAnErrorOfAll) {
  run_ranks(GetParam(), 3, kPatience, [](const Rank& rank) {
    const auto error = thrown<SystemError>([&] { SymmetricMemory(rank, std::int64_t{1} << 55); });
    check_text(error, str(std::int64_t{1} << 55, " bytes"));
    SymmetricMemory(rank, 64);
  });
}

TEST_P(Memory, OutlivesItsOwnerInAPeer) {
  run_ranks(GetParam(), 3, kPatience, [](const Rank& rank) {
    constexpr std::int64_t kPart = 300000;
    SymmetricMemory memory(rank, 3 * kPart);
    if (rank.index() == 0) return;
    sleep_seconds(0.1);
    std::memset(memory.at(0, rank.index() * kPart), 1, kPart);
  });
}

TEST_P(Memory, LeavesNothingBehind) {
  const OwnSharedFolder folder;
  run_ranks(GetParam(), 3, kPatience, [](const Rank& rank) {
    const auto round = [&] {
      Line line(rank, kPatience);
      LocalMemory local(1 << 16);
      *local.data() = std::byte{1};
      line.exchange();
    };
    for (int i = 0; i < 20; ++i) round();
    rank.barrier();
    const long descriptors_before = entries_of("/proc/self/fd"), mappings_before = mappings();
    rank.barrier();
    for (int i = 0; i < 1000; ++i) round();
    rank.barrier();
    // Not exactly: the other ranks' threads count at this moment too, and a slow peer's process is watched
    // from then on.
    constexpr int kSlack = 8;
    FERRY_CHECK(entries_of("/proc/self/fd") <= descriptors_before + kSlack,
                str(descriptors_before, " descriptors before"));
    FERRY_CHECK(mappings() <= mappings_before + kSlack, str(mappings_before, " mappings before"));
    rank.barrier();
  });
  EXPECT_TRUE(folder.empty());
}

TEST(LocalMemory, IsZeroAndRefusesTheImpossible) {
  const LocalMemory memory(1000);
  EXPECT_EQ(memory.bytes(), 1000);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(memory.data()[i], std::byte{0});
  EXPECT_THROW(LocalMemory(std::int64_t{1} << 60), SystemError);
}

}  // namespace
}  // namespace ferry::test
