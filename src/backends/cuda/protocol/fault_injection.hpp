// What tests have kernels do at named points: pause at random, or stop.
#pragma once

#include <cstdint>
#include <string>

namespace ferry::cuda {

// By what comes next.
enum class Point : std::uint32_t {
  none,
  header,  // a word of a letter, or a refusal
  values,  // a token's values of routes, for a rank that has rows of it: combine's weights too
  notes,   // what the receivers of messages must know of them
  row,     // a row, or a sum
  flag,    // the flags of what has been stored
  last,    // the last word of a call
  poll,    // a look for what a peer sends
};

struct FaultInjection {
  std::uint32_t any = 0;          // 0: nothing of what follows
  std::uint32_t share = 0;        // of 256: how often a thread pauses at a point; 0: never
  std::uint32_t nanoseconds = 0;  // at most
  Point stall = Point::none;      // where threads stop until the exchange has failed
};

// As the environment asks for it. `stall`: a point's name, or empty.
FaultInjection fault_injection_of(int jitter_percent, const std::string& stall);

}  // namespace ferry::cuda
