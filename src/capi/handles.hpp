// The objects behind the opaque handles of the C interface.
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
    for (const ferry::ExpertLocation& location : exchange.config().placement.locations()) {
      expert_rank.push_back(location.rank);
      expert_local.push_back(location.local);
    }
  }

  ferry::Exchange exchange;
  std::vector<std::int32_t> expert_rank, expert_local;  // [E] the placement, for ferry_exchange_config
};
