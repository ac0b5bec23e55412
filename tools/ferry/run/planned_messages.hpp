// The messages that the ranks of a `ferry run` send one another, as the routes imply them.
#pragma once

#include <cstdint>
#include <span>

#include "ferry/topology.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

// Whether relays add the sums of their nodes. `config` is as below.
bool relays_add(const Config& config);

// Adds the messages of one step, of all ranks. `config` is that of the exchange, which has chosen hops and
// reduction level. Both arrays are [ranks][ranks], from and to; the diagonal counts what stays on its rank.
void add_planned_messages(const RunSpec& spec, const Config& config, const Topology& topology, int step,
                          std::span<std::int64_t> dispatch, std::span<std::int64_t> combine);

}  // namespace ferry::app
