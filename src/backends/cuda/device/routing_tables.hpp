// Experts by position: in the order of their ranks and local numbers. Tables that the host makes once and
// every block of a dispatch copies to its shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.hpp"

namespace ferry::cuda {

struct RoutingTables {
  std::int64_t* capacity;      // [R] rows; expert_padded: rows of an expert
  std::int32_t* first_expert;  // [R+1] a rank's first position
  std::uint16_t* position_of;  // [E] by expert
  std::uint16_t* expert_at;    // [E] by position
  std::uint8_t* rank_of;       // [E] by position

  // A multiple of 16.
  static FERRY_HD constexpr std::int64_t bytes(int experts, int ranks) {
    return (8 * std::int64_t{ranks} + 4 * (std::int64_t{ranks} + 1) + 5 * std::int64_t{experts} + 15) / 16 *
           16;
  }
  static FERRY_HD RoutingTables at(std::byte* memory, int experts, int ranks) {
    RoutingTables tables;
    tables.capacity = reinterpret_cast<std::int64_t*>(memory);
    tables.first_expert = reinterpret_cast<std::int32_t*>(tables.capacity + ranks);
    tables.position_of = reinterpret_cast<std::uint16_t*>(tables.first_expert + ranks + 1);
    tables.expert_at = tables.position_of + experts;
    tables.rank_of = reinterpret_cast<std::uint8_t*>(tables.expert_at + experts);
    return tables;
  }
};

}  // namespace ferry::cuda
