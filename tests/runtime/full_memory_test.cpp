// Shared memory of a group that is full, or damaged by another process.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "group/control_block.hpp"
#include "runtime/channel_support.hpp"
#include "seed.hpp"

namespace ferry::test {
namespace {

// ---- A full shared-memory directory: every rank gets an error, no process is killed by a signal, and no
// memory leaks.

constexpr std::int64_t kMegabyte = 1 << 20;

// Enters a mount namespace of its own, as root of a user namespace, so that the test needs no privileges.
bool enter_mount_namespace() {
  const uid_t user = getuid();
  if (unshare(user == 0 ? CLONE_NEWNS : CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  if (user != 0) std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
  return mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

std::int64_t free_bytes(const std::string& directory) {
  struct statvfs status{};
  FERRY_CHECK(statvfs(directory.c_str(), &status) == 0, directory);
  return static_cast<std::int64_t>(status.f_bavail * status.f_frsize);
}

// Runs `body` where FERRY_SHM_DIR is a tmpfs of 8 MB.
void run_in_small_memory(const std::function<void(const std::string&)>& body) {
  const std::string directory = std::filesystem::temp_directory_path() / str("ferry-small-", getpid());
  std::filesystem::create_directory(directory);
  const int status = run_process([&] {
    if (!enter_mount_namespace() || mount("tmpfs", directory.c_str(), "tmpfs", 0, "size=8m") != 0)
      _exit(kSkipped);
    setenv("FERRY_SHM_DIR", directory.c_str(), 1);
    body(directory);
  });
  std::filesystem::remove(directory);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kSkipped)
    GTEST_SKIP() << "this system does not allow mounting a tmpfs";
  EXPECT_EQ(status, 0);
}

TEST(FullMemory, EveryRankThrowsWithTheBytesWantedAndFree) {
  run_in_small_memory([](const std::string& directory) {
    const std::int64_t before = free_bytes(directory);
    run_ranks(GroupKind::processes, 4, 30, [&](const Rank& rank) {
      const auto error = expect_thrown<SystemError>([&] { SymmetricMemory(rank, 9 * kMegabyte); });
      require_text(error,
                   str("shared memory in ", directory, " is too small: ", 9 * kMegabyte, " bytes needed, "));
      require_text(error, str(8 * kMegabyte, " bytes free"));
      FERRY_CHECK(error.error_number == ENOSPC, str(error.error_number));
    });
    FERRY_CHECK(free_bytes(directory) == before, "memory was not released");
  });
}

TEST(FullMemory, MemoryOfTheRanksThatSucceededIsReleased) {
  run_in_small_memory([](const std::string& directory) {
    const std::int64_t before = free_bytes(directory);
    run_ranks(GroupKind::processes, 4, 30, [&](const Rank& rank) {
      for (int round = 0; round < 20; ++round) {
        // Memory for two or three of the four ranks.
        const Stopwatch watch;
        const auto error = expect_thrown<SystemError>([&] { SymmetricMemory(rank, 5 * kMegabyte / 2); });
        require_text(error, "is too small");
        FERRY_CHECK(watch.seconds() < 5, str(watch.seconds()));
        rank.barrier();
        SymmetricMemory fits(rank, 3 * kMegabyte / 2);
        std::memset(fits.at((rank.index() + 1) % 4, 0), round, static_cast<std::size_t>(fits.bytes()));
        rank.barrier();  // no rank releases its memory before all have written
        fits = SymmetricMemory(rank, 64);
      }
    });
    FERRY_CHECK(free_bytes(directory) == before, "memory was not released");
  });
}

TEST(FullMemory, AMissingDirectoryIsNamed) {
  const int status = run_process([] {
    setenv("FERRY_SHM_DIR", "/nowhere/at/all", 1);
    run_ranks(GroupKind::processes, 2, 30, [](const Rank& rank) {
      require_text(expect_thrown<SystemError>([&] { SymmetricMemory(rank, 64); }), "/nowhere/at/all");
    });
  });
  EXPECT_EQ(status, 0);
}

// ---- What other processes have stored in a group's shared memory may be damaged: no number of it is used as
// an index, and no text is read past its end.

constexpr int kRanks = 3;

void expect_bounded(const ErrorRecord& record) {
  for (const int rank : {record.wait.rank, record.wait.peer, record.wait.via}) {
    EXPECT_GE(rank, -1);
    EXPECT_LT(rank, kRanks);
  }
  EXPECT_LE(record.message().size(), sizeof record.text);
}

TEST(DamagedMemory, IsBoundedByTheControlBlock) {
  std::mt19937_64 random(seed());
  for (int step = 0; step < 200; ++step) {
    const auto bytes = static_cast<std::size_t>(ControlBlock::bytes(kRanks));
    Mapping memory = Mapping::anonymous_shared(static_cast<std::int64_t>(bytes));
    std::byte* const begin = memory.data();
    const ControlBlock control(std::move(memory), kRanks);
    std::generate_n(begin, bytes, [&] { return static_cast<std::byte>(random() % (1 + step % 256)); });
    const std::uint32_t numbers[] = {1, kRanks, kRanks + 1, kRanks + 2, 1u << 20, ~0u};
    // The reporter of the failure, its epoch, and the first rank to fail.
    const std::uint32_t words[] = {numbers[random() % std::size(numbers)], kFirstEpoch + 1,
                                   numbers[random() % std::size(numbers)]};
    std::memcpy(begin, words, sizeof words);
    EXPECT_FALSE(control.failed()) << "by the failure of another epoch";
    std::memcpy(begin + 4, &kFirstEpoch, sizeof kFirstEpoch);
    ASSERT_TRUE(control.failed());
    expect_bounded(control.failure());
    const int first = control.first_failed_rank();
    ASSERT_GE(first, -1);
    ASSERT_LT(first, kRanks);
    if (first >= 0) expect_bounded(control.error_of(first));
    EXPECT_ANY_THROW(control.throw_failure({}));
  }
}

}  // namespace
}  // namespace ferry::test
