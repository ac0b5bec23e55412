// Shared memory that is full: an error of every rank, never a signal, and nothing kept.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "runtime/channel_support.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kMegabyte = 1 << 20;

// As root of a user namespace of its own, so that the test needs no rights.
bool own_mounts() {
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
    if (!own_mounts() || mount("tmpfs", directory.c_str(), "tmpfs", 0, "size=8m") != 0) _exit(kSkipped);
    setenv("FERRY_SHM_DIR", directory.c_str(), 1);
    body(directory);
  });
  std::filesystem::remove(directory);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kSkipped)
    GTEST_SKIP() << "this system lets us mount no tmpfs";
  EXPECT_EQ(status, 0);
}

TEST(FullMemory, IsAnErrorOfEveryRankWithTheNumbers) {
  run_in_small_memory([](const std::string& directory) {
    const std::int64_t before = free_bytes(directory);
    run_ranks(Kind::processes, 4, 30, [&](const Rank& rank) {
      const auto error = thrown<SystemError>([&] { SymmetricMemory(rank, 9 * kMegabyte); });
      check_text(error,
                 str("shared memory in ", directory, " is too small: ", 9 * kMegabyte, " bytes wanted, "));
      check_text(error, str(8 * kMegabyte, " bytes free"));
      FERRY_CHECK(error.error_number == ENOSPC, str(error.error_number));
    });
    FERRY_CHECK(free_bytes(directory) == before, "memory is kept");
  });
}

TEST(FullMemory, ThatSomeRanksGotIsGivenBack) {
  run_in_small_memory([](const std::string& directory) {
    const std::int64_t before = free_bytes(directory);
    run_ranks(Kind::processes, 4, 30, [&](const Rank& rank) {
      for (int round = 0; round < 20; ++round) {
        // Two or three of the four fit.
        const Stopwatch watch;
        const auto error = thrown<SystemError>([&] { SymmetricMemory(rank, 5 * kMegabyte / 2); });
        check_text(error, "is too small");
        FERRY_CHECK(watch.seconds() < 5, str(watch.seconds()));
        rank.barrier();
        SymmetricMemory fits(rank, 3 * kMegabyte / 2);
        std::memset(fits.at((rank.index() + 1) % 4, 0), round, static_cast<std::size_t>(fits.bytes()));
        rank.barrier();  // everyone holds it until all have written
        fits = SymmetricMemory(rank, 64);
      }
    });
    FERRY_CHECK(free_bytes(directory) == before, "memory is kept");
  });
}

TEST(FullMemory, ADirectoryThatIsNoneIsNamed) {
  const int status = run_process([] {
    setenv("FERRY_SHM_DIR", "/nowhere/at/all", 1);
    run_ranks(Kind::processes, 2, 30, [](const Rank& rank) {
      check_text(thrown<SystemError>([&] { SymmetricMemory(rank, 64); }), "/nowhere/at/all");
    });
  });
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace ferry::test
