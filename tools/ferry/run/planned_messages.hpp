// The messages that the ranks of a `ferry run` send one another, as the routes imply them.
#pragma once

#include "ferry/topology.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/shared_results.hpp"

namespace ferry::app {

// Whether relays add the sums of their nodes. `config` is as below.
bool relays_add(const Config& config);

// Adds the messages of one step, of all ranks. `config` is that of the exchange, which has chosen hops and
// reduction level.
void add_planned_messages(const RunSpec& spec, const Config& config, const Topology& topology, int step,
                          const SharedResults& results);

}  // namespace ferry::app
