// Operations that move no rows: step metadata, one value a route, and the refusal of a call. One launch each.
#pragma once

#include <cuda_runtime_api.h>

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

void launch_metadata(const MetadataArguments& arguments, cudaStream_t stream);

struct RouteValuesArguments {
  LaneView lane;
  AgreedOptions terms;
  void* plan;
  const float* values;  // [N, K]
  float* row_values;    // [total]
  Phase phase = Phase::fused;
  Operation operation = Operation::route_values;  // the operation that needs the values
};

void launch_route_values(const RouteValuesArguments& arguments, const LaunchShape& shape,
                         cudaStream_t stream);

struct RefusalArguments {
  LaneView lane;
  Operation operation;
  ErrorRecord refusal;
};

void launch_refusal(const RefusalArguments& arguments, cudaStream_t stream);

}  // namespace ferry::cuda
