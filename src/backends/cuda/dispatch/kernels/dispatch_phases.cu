// Kernels of split dispatches whose rows are moved, not computed, and whose routes come from ids.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* phase_kernel(Quantisation quantisation) {
  switch (quantisation) {
    case Quantisation::fp8:
      return kernel_of_phases<SpecialisedDispatch<Quantisation::fp8, false>>();
    case Quantisation::mx:
    case Quantisation::nvfp4:
    case Quantisation::microscaled:
      return kernel_of_phases<SpecialisedDispatch<Quantisation::microscaled, false>>();
    case Quantisation::none:
      break;
  }
  return kernel_of_phases<SpecialisedDispatch<Quantisation::none, false>>();
}

}  // namespace ferry::cuda
