// Phases of an operation: a launch carries out the send phase, the receive phase, or both.
#pragma once

namespace ferry::cuda {

enum class Phase {
  fused,    // both phases in one kernel, by different blocks
  send,     // sends; waits for no peer's data
  receive,  // receives what a send phase of the same call has sent
};

}  // namespace ferry::cuda
