// The steps of experts in slices on a device: kernels on the caller's stream.
#pragma once

#include <memory>

#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/sliced/steps.hpp"

namespace ferry::cuda {

// A step of the lane whose view is `lane`: that of the backend inside.
template <class Call>
struct SliceStep {
  LaneView lane;
  Call call;
  bool may_be_aborted;  // the call that has gathered the terms, in a kernel
};

// `blocks`: of a launch. `late_errors`: as SlicedContext.
std::unique_ptr<sliced::SliceSteps> make_slice_steps(const LaneView& lane, int blocks, bool late_errors);

}  // namespace ferry::cuda
