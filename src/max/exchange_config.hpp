// The configuration of an exchange with MAX's call shapes.
#pragma once

#include "ferry/config.hpp"
#include "ferry/group.hpp"

namespace ferry::max {

// Collective: if this rank refuses its configuration, the peers' construction ends too. Throws UsageError or
// UnsupportedError.
Config config_or_refuse(const Rank& rank, const Config& config);

}  // namespace ferry::max
