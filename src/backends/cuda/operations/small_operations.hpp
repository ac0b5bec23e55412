// Operations that move no rows: step metadata, one value a route, and the refusal of a call.
#pragma once

#include "backends/cuda/device/phase.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {

struct MetadataArguments {
  LaneView lane;
  AgreedOptions terms;
  std::int32_t count;
  const std::int32_t* device_count;  // or null
  StepMetadata* metadata;            // device memory
};

extern const Kernel<MetadataArguments> kMetadataKernels[3];  // by Phase

// Values of routes [N, K] go to rows [total], or with return_values those of rows to routes.
struct RouteValuesArguments {
  LaneView lane;
  AgreedOptions terms;
  void* plan;
  const float* from;
  float* to;
  Phase phase = Phase::fused;
  Operation operation = Operation::route_values;  // the operation that needs the values
  bool continues = false;                         // the call goes on: its number is not stored

  FERRY_HD bool returns() const { return operation == Operation::return_values; }
};

extern const Kernel<RouteValuesArguments> kRouteValuesKernel;

struct RefusalArguments {
  LaneView lane;
  Operation operation;
  ErrorRecord refusal;
};

// Posts the refusal, and ends the call when all ranks have called.
extern const Kernel<RefusalArguments> kRefusalKernel;
extern const Kernel<RefusalArguments> kPostRefusalKernel;  // only posts it

}  // namespace ferry::cuda
