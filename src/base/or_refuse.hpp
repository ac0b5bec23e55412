// The guard around a rank's own part of a collective call.
#pragma once

#include "ferry/error.hpp"

namespace ferry {

// Returns step(). If it throws a `Refused`, which only this rank knows of, calls `refuse` with it first, so
// that the peers' call ends with the same error instead of waiting.
template <class Refused = Error, class Refuse, class Step>
decltype(auto) or_refuse(Refuse refuse, Step step) {
  try {
    return step();
  } catch (const Refused& error) {
    refuse(error);
    throw;
  }
}

}  // namespace ferry
