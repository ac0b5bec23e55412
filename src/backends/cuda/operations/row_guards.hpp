// Guard bytes behind rows that the caller's encoder writes (test builds).
#pragma once

#include "backends/cuda/runtime/launch.hpp"
#include "base/host_device.hpp"
#include "exchange/device_work.hpp"

namespace ferry::cuda {

struct RowGuardArguments {
  GuardedRows rows;
  int value;                    // of every guard byte
  int part;                     // of the rows
  unsigned long long* written;  // largest BrokenGuard so far, as a number; 0: none
};

FERRY_HD constexpr unsigned long long number_of(const BrokenGuard& broken) {
  return static_cast<unsigned long long>(broken.part) << 40 | static_cast<unsigned long long>(broken.row + 1);
}
FERRY_HD constexpr BrokenGuard broken_guard(unsigned long long number) {
  return {static_cast<int>(number >> 40), static_cast<std::int64_t>(number & 0xFFFFFFFFFF) - 1};
}

extern const Kernel<RowGuardArguments> kFillGuardsKernel, kCheckGuardsKernel;

}  // namespace ferry::cuda
