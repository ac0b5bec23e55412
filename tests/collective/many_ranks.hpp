// A layer over hundreds of ranks on simulated nodes, each a thread.
#pragma once

#include "ferry/types.hpp"
#include "harness/harness.hpp"

namespace ferry::contract {

// `ranks` ranks of two tokens each, dealt out to nodes of eight ranks in turn.
TestCase many_ranks_case(int ranks);

// Runs one dispatch and one combine with these hops; the oracle checks every byte, the counts of messages by
// hop, and the size query is compared with what each exchange maps.
void run_many_ranks(const Setup& setup, TestCase c, Hops hops);

}  // namespace ferry::contract
