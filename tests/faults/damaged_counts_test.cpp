// Counts that are damaged in the memory that ranks share: the rank that reads them says so, and nothing
// outside its memory is read or written.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"
#include "group/fault_points.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

constexpr int kRanks = 2, kExperts = 8, kTokens = 36, kHidden = 64;

// What a rank tells its peers: its tokens for each expert, and for each rank.
constexpr std::array<std::int32_t, kExperts + kRanks> kCounts = {1, 2, 3, 4, 5, 6, 7, 8, 10, 26};

std::size_t damaged_count = 0;
std::int32_t damaged_value = 0;

void damage_counts(FaultPoint point, int rank) {
  if (point != FaultPoint::dispatch_waited || rank != 1) return;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string rights;
    std::istringstream(line) >> std::hex >> begin >> dash >> end >> rights;
    if (rights != "rw-s" || line.find("memfd:ferry") == std::string::npos) continue;
    for (std::uintptr_t at = begin; at + sizeof kCounts <= end; at += sizeof(std::int32_t)) {
      auto* const counts = reinterpret_cast<std::int32_t*>(at);
      if (std::memcmp(counts, kCounts.data(), sizeof kCounts) == 0) counts[damaged_count] = damaged_value;
    }
  }
}

// True if the call reports bad counts; any other error is thrown.
bool reports_damage(Exchange& exchange) {
  const std::vector<float> tokens(kTokens * kHidden, 1);
  std::vector<std::int32_t> ids;
  for (int expert = 0; expert < kExperts; ++expert)
    ids.insert(ids.end(), static_cast<std::size_t>(kCounts[static_cast<std::size_t>(expert)]), expert);
  try {
    exchange.dispatch(Tokens::rows(tokens.data(), kTokens, DType::fp32), ids.data());
    return false;
  } catch (const BadSourceError&) {
    return true;
  }
}

TEST(DamagedCounts, AreNotBelieved) {
  for (damaged_count = 0; damaged_count < kCounts.size(); ++damaged_count) {
    for (const std::int32_t value : {-1, kTokens + 1, std::numeric_limits<std::int32_t>::min()}) {
      damaged_value = value;
      set_fault_hook(damage_counts);
      Group::processes(kRanks).run([](const Rank& rank) {
        const Config config{.experts = kExperts,
                            .top_k = 1,
                            .hidden = kHidden,
                            .max_tokens = kTokens,
                            .backend = BackendKind::cpu,
                            .format = Format::fp32(),
                            .combine_type = DType::fp32,
                            .deadline = 20};
        Exchange exchange(rank, config);
        const bool reported = reports_damage(exchange);
        FERRY_CHECK(rank.index() == 0 || reported, "the rank that reads a damaged count reports it");
        rank.barrier();
        set_fault_hook(nullptr);
        FERRY_CHECK(!reports_damage(exchange), "the exchange is usable");
      });
      set_fault_hook(nullptr);
    }
  }
}

}  // namespace
}  // namespace ferry::test
