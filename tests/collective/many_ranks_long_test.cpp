// 1,024 ranks on 128 simulated nodes.
#include <fstream>
#include <string>

#include "collective/many_ranks.hpp"

namespace ferry::contract {
namespace {

std::int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::int64_t kibibytes = 0;
    if (word == "MemAvailable:" && file >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

// Every rank holds a block of counts to and from every other rank, and a plan with the messages between all
// ranks: 17 MB, and so 17 GB in this process.
void run_thousand(const Setup& setup, Hops hops) {
  TestCase c = many_ranks_case(1024);
  c.config.backend = setup.backend;
  c.config.hops = hops;
  constexpr std::int64_t kOfTheTest = std::int64_t{1} << 30;
  const std::int64_t needed = c.ranks * size_of(c.config, Topology(c.nodes)).total() + kOfTheTest;
  if (const std::int64_t available = available_memory(); available < needed)
    GTEST_SKIP() << "needs " << (needed >> 20) << " MiB of memory, and " << (available >> 20) << " are free";
  run_many_ranks(setup, c, hops);
}

TEST(ManyRanksLong, AThousandInOneHop) {
  run_thousand({BackendKind::collective, RankKind::engine_threads}, Hops::one);
}

TEST(ManyRanksLong, AThousandInTwoHops) {
  run_thousand({BackendKind::collective, RankKind::engine_threads}, Hops::two);
}

TEST(ManyRanksLong, AThousandOnSharedMemory) {
  run_thousand({BackendKind::cpu, RankKind::threads}, Hops::one);
}

}  // namespace
}  // namespace ferry::contract
