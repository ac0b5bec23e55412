// Checks Rank::all_gather with random bytes.
#pragma once

#include <cstring>
#include <vector>

#include "base/text.hpp"
#include "runtime/support.hpp"

namespace ferry::test {

inline std::vector<unsigned char> part_of(std::uint64_t seed_value, int rank, std::size_t bytes) {
  Random random(seed_value + 1000003 * static_cast<std::uint64_t>(rank));
  std::vector<unsigned char> part(bytes);
  for (unsigned char& byte : part) byte = static_cast<unsigned char>(random());
  return part;
}

inline void check_gather(const Rank& rank, std::uint64_t seed_value, std::size_t bytes) {
  constexpr std::size_t kGuard = 64;
  const std::vector<unsigned char> mine = part_of(seed_value, rank.index(), bytes);
  std::vector<unsigned char> all(rank.size() * bytes + kGuard, 0xA5);
  rank.all_gather(mine.data(), all.data(), bytes);
  for (int peer = 0; peer < rank.size(); ++peer) {
    const std::vector<unsigned char> expected = part_of(seed_value, peer, bytes);
    FERRY_CHECK(bytes == 0 || std::memcmp(all.data() + peer * bytes, expected.data(), bytes) == 0,
                str("rank ", rank.index(), " got wrong bytes of rank ", peer, ", ", bytes, " bytes"));
  }
  for (std::size_t i = 0; i < kGuard; ++i)
    FERRY_CHECK(all[rank.size() * bytes + i] == 0xA5, "bytes past the end were overwritten");
}

}  // namespace ferry::test
