// What can be wrong with a plan, or with the arguments beside it, when only the device can look.
#pragma once

#include <cstdint>

namespace ferry::cuda {

enum class PlanFault : std::int32_t {
  none,
  damaged,
  configuration,
  rank,
  tokens,
  outputs_and_result,
  values
};

}  // namespace ferry::cuda
