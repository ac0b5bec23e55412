// Fault injection for tests: kernels pause at random, or stall, at named points of the protocol. Only builds
// with FERRY_TEST_HOOKS do; in production kernels the points are empty (inject_fault in wait.cuh).
#pragma once

#include <cstdint>
#include <string>

namespace ferry::cuda {

// A point of the protocol inside the kernels, named after the step that follows it.
enum class KernelPoint : std::uint32_t {
  none,
  header,         // stores a word of a call header, or a refusal
  counts,         // publishes the counts of a block's tokens to the other blocks
  route_values,   // stores a token's route values for a rank; combine's weights are such values too
  metadata,       // stores the slot metadata of a message
  row,            // stores a row or a sum
  flag,           // sets the flags of stored rows
  end_of_stream,  // sets the end-of-stream flag of a call
  poll,           // polls for data of a peer
  // In two hops:
  hop_send,     // stores a message for a relay or a final rank
  hop_relay,    // forwards a message, or adds rows
  hop_receive,  // takes a message out of its window
};

struct FaultInjection {
  std::uint32_t any = 0;                  // 0: nothing below is in force
  std::uint32_t probability = 0;          // of a pause at a point, in 1/256
  std::uint32_t max_pause_ns = 0;         // pauses are uniform in [0, max_pause_ns)
  KernelPoint stall = KernelPoint::none;  // threads stall here until the exchange has failed
};

// `jitter_percent`: how often threads pause, 0 to 100 (larger counts as 100). `stall`: a point's name, or
// empty for none; UsageError for an unknown name.
FaultInjection fault_injection_of(int jitter_percent, const std::string& stall);

}  // namespace ferry::cuda
