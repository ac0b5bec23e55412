// How much memory the CPU backend takes, computed from the layout it uses.
#pragma once

#include "exchange/configuration.hpp"

namespace ferry::cpu {

ExchangeLayout symmetric_layout(const Config& config);
Sizes cpu_sizes(const Config& config, int rank);
// Sizes of memory that only this rank uses: results and plans.
Sizes local_sizes(const Config& config, int rank);

}  // namespace ferry::cpu
