// What stands behind the handles of the C interface.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "capi/boundary.hpp"
#include "ferry/exchange.hpp"
#include "ferry/group.hpp"

struct ferry_group {
  ferry::Group group;
};

struct ferry_rank {
  ferry::Rank rank;
};

struct ferry_exchange {
  ferry_exchange(ferry::Rank rank, const ferry::Config& config) : exchange(std::move(rank), config) {
    for (const ferry::ExpertLocation& place : exchange.config().placement.places()) {
      expert_rank.push_back(place.rank);
      expert_local.push_back(place.local);
    }
  }

  ferry::Exchange exchange;
  std::vector<std::int32_t> expert_rank, expert_local;  // the placement as ferry_exchange_config shows it
};
