// Counts that are damaged in the memory that ranks share: the rank that reads them says so, and nothing
// outside its memory is read or written.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "exchange/configuration.hpp"
#include "ferry/ferry.hpp"
#include "group/fault_points.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

constexpr int kRanks = 2, kExperts = 8, kTokens = 36, kHidden = 64;

// What a rank tells its peers: its tokens for each expert, and for each rank.
constexpr std::array<std::int32_t, kExperts + kRanks> kCounts = {1, 2, 3, 4, 5, 6, 7, 8, 10, 26};

constexpr std::int32_t kCount = 0x2ead1234;  // given to metadata

int damaged_count = 0;
std::int32_t damaged_value = 0;

void damage_counts(FaultPoint point, int rank) {
  if ((point != FaultPoint::dispatch_waited && point != FaultPoint::metadata_waited) || rank != 1) return;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string rights;
    std::istringstream(line) >> std::hex >> begin >> dash >> end >> rights;
    if (rights != "rw-s" || line.find("memfd:ferry") == std::string::npos) continue;
    for (std::uintptr_t at = begin; at + sizeof kCounts <= end; at += sizeof(std::int32_t)) {
      auto* const counts = reinterpret_cast<std::int32_t*>(at);
      if (point == FaultPoint::metadata_waited && *counts == kCount) *counts = damaged_value;
      if (point == FaultPoint::dispatch_waited && std::memcmp(counts, kCounts.data(), sizeof kCounts) == 0)
        counts[damaged_count] = damaged_value;
    }
  }
}

// True if the call reports bad counts; any other error is thrown.
bool reports_damage(Exchange& exchange, Operation operation) {
  const std::vector<float> tokens(kTokens * kHidden, 1);
  std::vector<std::int32_t> ids;
  for (int expert = 0; expert < kExperts; ++expert)
    ids.insert(ids.end(), static_cast<std::size_t>(kCounts[static_cast<std::size_t>(expert)]), expert);
  try {
    if (operation == Operation::dispatch)
      exchange.dispatch(Tokens::rows(tokens.data(), kTokens, DType::fp32), ids.data());
    else if (operation == Operation::dispatch_counts)
      exchange.dispatch_counts(ids.data(), kTokens);
    else
      exchange.metadata(kCount);
    return false;
  } catch (const BadSourceError&) {
    return operation == Operation::dispatch;
  } catch (const SystemError& error) {
    return std::string(error.what()).find("is damaged") != std::string::npos;
  }
}

// Damages each number, and lets the rank that reads it find that out.
void require_found(Operation operation, int first, int end) {
  for (damaged_count = first; damaged_count < end; ++damaged_count) {
    for (const std::int32_t value : {-1, kTokens + 1, std::numeric_limits<std::int32_t>::min()}) {
      damaged_value = value > 0 && operation == Operation::metadata ? kCount * 2 : value;
      set_fault_hook(damage_counts);
      Group::processes(kRanks).run([&](const Rank& rank) {
        const Config config{.experts = kExperts,
                            .top_k = 1,
                            .hidden = kHidden,
                            .max_tokens = kTokens,
                            .backend = BackendKind::cpu,
                            .format = Format::fp32(),
                            .combine_type = DType::fp32,
                            .deadline = 20};
        Exchange exchange(rank, config);
        const bool reported = reports_damage(exchange, operation);
        FERRY_CHECK(rank.index() == 0 || reported, "the rank that reads a damaged count reports it");
        rank.barrier();
        set_fault_hook(nullptr);
        FERRY_CHECK(!reports_damage(exchange, operation), "the exchange is usable");
      });
      set_fault_hook(nullptr);
    }
  }
}

TEST(DamagedCounts, AreNotBelieved) {
  require_found(Operation::dispatch, 0, kExperts + kRanks);
}

TEST(DamagedCounts, OfDispatchCountsAreNotBelieved) {
  require_found(Operation::dispatch_counts, -kCallSummaryWords, -kCallSummaryWords + 1);  // N
  // A rank reads the routes to its own experts, and the messages to itself.
  require_found(Operation::dispatch_counts, kExperts / kRanks, kExperts);
  require_found(Operation::dispatch_counts, kExperts + 1, kExperts + kRanks);
}

TEST(DamagedCounts, OfMetadataAreNotBelieved) {
  require_found(Operation::metadata, 0, 1);
}

// The first collective of a constructor: how long the texts are that describe the ranks' configurations.
TEST(DamagedCounts, OfTextsAreNotBelieved) {
  for (const std::uint64_t length : {std::uint64_t{1} << 60, std::uint64_t{3} << 30}) {
    for (const bool damages_own : {false, true}) {
      const TestBootstrap meeting(kRanks);
      std::array<std::string, kRanks> errors;
      std::vector<std::thread> threads;
      for (int r = 0; r < kRanks; ++r) {
        threads.emplace_back([&, r] {
          std::atomic<bool> joined = false;
          Bootstrap bootstrap = meeting.bootstrap(r);
          bootstrap.host_id = std::to_string(r);  // so that the group's collectives go through the bootstrap
          bootstrap.all_gather = [&, gather = bootstrap.all_gather](const void* mine, void* all,
                                                                    std::size_t bytes) {
            gather(mine, all, bytes);
            if (!joined.exchange(false)) return;
            auto* const last = static_cast<std::byte*>(all) + (damages_own ? r + 1 : 2 - r) * bytes;
            std::memcpy(last - sizeof length, &length, sizeof length);
          };
          Group::custom(bootstrap).run([&](const Rank& rank) {
            joined = true;
            try {
              Exchange(rank, {.experts = 2, .top_k = 1, .hidden = 8, .max_tokens = 1, .deadline = 20});
            } catch (const SystemError& error) {
              errors[static_cast<std::size_t>(r)] = error.what();
            }
          });
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (const std::string& error : errors) EXPECT_NE(error.find("is damaged"), std::string::npos) << error;
    }
  }
}

}  // namespace
}  // namespace ferry::test
