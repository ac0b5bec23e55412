// Routing tables: on which rank each expert is. The host fills them once for each lane; every block of a
// dispatch copies them to its shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.hpp"

namespace ferry::cuda {

// An expert's physical index is its number when all experts are sorted by rank, then by local number. An
// expert's id is the caller's and may be on any rank.
struct RoutingTables {
  std::int64_t* capacity;        // [R] rows; expert_padded: rows of an expert
  std::int32_t* first_physical;  // [R+1] physical index of a rank's first expert
  std::uint16_t* physical_of;    // [E] physical index, by id
  std::uint16_t* expert_of;      // [E] id, by physical index
  std::uint8_t* rank_of;         // [E] rank, by physical index

  // A multiple of 16.
  static FERRY_HD constexpr std::int64_t bytes(int experts, int ranks) {
    return (8 * std::int64_t{ranks} + 4 * (std::int64_t{ranks} + 1) + 5 * std::int64_t{experts} + 15) / 16 *
           16;
  }
  static FERRY_HD RoutingTables at(std::byte* memory, int experts, int ranks) {
    RoutingTables tables;
    tables.capacity = reinterpret_cast<std::int64_t*>(memory);
    tables.first_physical = reinterpret_cast<std::int32_t*>(tables.capacity + ranks);
    tables.physical_of = reinterpret_cast<std::uint16_t*>(tables.first_physical + ranks + 1);
    tables.expert_of = tables.physical_of + experts;
    tables.rank_of = reinterpret_cast<std::uint8_t*>(tables.expert_of + experts);
    return tables;
  }
};

}  // namespace ferry::cuda
