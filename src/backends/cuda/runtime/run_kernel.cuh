// Kernels that do no more than run a device function.
#pragma once

#include <type_traits>

#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {

// Every thread calls kRun(arguments), or kRun(arguments, &state) with a State in shared memory.
template <class Arguments, auto kRun, int kThreads, class State>
__global__ void __launch_bounds__(kThreads) run_kernel(const __grid_constant__ Arguments arguments) {
  if constexpr (std::is_void_v<State>) {
    kRun(arguments);
  } else {
    __shared__ State state;
    kRun(arguments, &state);
  }
}

// `action`: for the error message.
template <class Arguments, auto kRun, int kThreads, class State = void>
Kernel<Arguments> kernel_of(const char* action) {
  return {&run_kernel<Arguments, kRun, kThreads, State>, kThreads, action};
}

}  // namespace ferry::cuda
