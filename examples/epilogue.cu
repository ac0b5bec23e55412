// One rank runs an MoE layer on a GPU. A function of this program finishes the combine: bias, then ReLU.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "ferry/cuda/transform_result.cuh"
#include "ferry/ferry.hpp"

namespace {

constexpr int kTokens = 2, kHidden = 4;

struct BiasAndRelu {
  const float* bias;

  __device__ float operator()(float y, std::int64_t /*row*/, int column) const {
    return fmaxf(y + bias[column], 0);
  }
};

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Memory that the host and the GPU can access.
template <class T>
T* pinned(std::initializer_list<T> values) {
  void* memory = nullptr;
  check(cudaMallocHost(&memory, values.size() * sizeof(T)));
  std::copy(values.begin(), values.end(), static_cast<T*>(memory));
  return static_cast<T*>(memory);
}

void run(const ferry::Rank& rank) {
  ferry::Config config{.experts = 2, .top_k = 2, .hidden = kHidden, .max_tokens = kTokens};
  config.backend = ferry::BackendKind::cuda;
  config.format = ferry::Format::fp32();
  config.combine_type = ferry::DType::fp32;
  ferry::Exchange exchange(rank, config);
  const float* const x = pinned<float>({1, 1, 1, 1, 2, 2, 2, 2});
  const std::int32_t* const ids = pinned<std::int32_t>({0, 1, 1, 0});
  const float* const weights = pinned<float>({0.5f, 0.25f, 0.5f, 0.25f});
  const float* const bias = pinned<float>({-1, 0, 1, 2});
  const ferry::Result result{.data = pinned<float>({0, 0, 0, 0, 0, 0, 0, 0}), .type = ferry::DType::fp32};
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));

  const ferry::DispatchResult received = exchange.dispatch(
      ferry::Tokens::rows(x, kTokens, ferry::DType::fp32), ids, weights, {.call = {.stream = {stream}}});
  // ... the experts; here their outputs are the rows they receive ...
  exchange.combine({.data = received.data, .type = ferry::DType::fp32}, received.plan, result,
                   {.call = {.stream = {stream}}, .row_weights = received.weight});
  check(ferry::cuda::transform_result(result, kTokens, kHidden, BiasAndRelu{bias}, stream));
  exchange.synchronize({.stream = {stream}});

  for (int token = 0; token < kTokens; ++token) {
    const float* const y = static_cast<const float*>(result.data) + token * kHidden;
    std::printf("token %d: %g %g %g %g\n", token, y[0], y[1], y[2], y[3]);
  }
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU here\n");
    return 0;
  }
  ferry::Group::threads(1).run(run);
}
