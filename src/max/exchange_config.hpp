// The configuration of an exchange with MAX's call shapes, and the options of its dispatches.
#pragma once

#include "ferry/config.hpp"
#include "ferry/exchange.hpp"
#include "ferry/group.hpp"
#include "ferry/max.hpp"

namespace ferry::max {

// Collective: if this rank refuses its configuration, the peers' construction ends too. Throws UsageError or
// UnsupportedError.
Config config_or_refuse(const Rank& rank, const Config& config);

DispatchOptions dispatch_options(const TokenFormat& format, int lane);

}  // namespace ferry::max
