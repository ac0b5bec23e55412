// Two ranks dispatch in a format of this program's: int8 values with one fp32 scale for each row. The same
// function encodes rows on the host and, where there is a GPU, on the device.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ferry/cuda/encoder.cuh"
#include "ferry/ferry.hpp"

namespace {

constexpr int kRanks = 2, kTokens = 4, kHidden = 64;

struct EncodeInt8 {
  __host__ __device__ void operator()(const ferry::cuda::RowToEncode& row) const {
    float mine = 0;
    for (int c = row.thread; c < row.hidden; c += row.threads) mine = fmaxf(mine, fabsf(row.value(c)));
    const float scale = row.largest(mine) / 127;
    auto* const values = reinterpret_cast<std::int8_t*>(row.parts[0]);
    for (int c = row.thread; c < row.hidden; c += row.threads)
      values[c] = scale == 0 ? std::int8_t{0} : static_cast<std::int8_t>(rintf(row.value(c) / scale));
    if (row.thread == 0) *reinterpret_cast<float*>(row.parts[1]) = scale;
  }
};

// Values, and 16 bytes that begin with the scale: parts are multiples of 16 bytes.
std::array<std::int64_t, ferry::kMaxParts> part_bytes(int hidden) {
  return {hidden, 16};
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

float token_value(int rank, int token, int column) {
  return std::sin(static_cast<float>(1 + rank * kTokens * kHidden + token * kHidden + column));
}

// Dispatches, and returns the largest error of a received value.
float largest_error(const ferry::Rank& rank, const ferry::Format& format, ferry::BackendKind backend) {
  ferry::Config config{.experts = kRanks, .top_k = 1, .hidden = kHidden, .max_tokens = kTokens};
  config.backend = backend;
  config.format = format;
  ferry::Exchange exchange(rank, config);
  const bool on_gpu = backend == ferry::BackendKind::cuda;
  std::vector<float> x;
  std::vector<std::int32_t> ids;
  for (int token = 0; token < kTokens; ++token) {
    ids.push_back((rank.index() + token) % kRanks);
    for (int column = 0; column < kHidden; ++column) x.push_back(token_value(rank.index(), token, column));
  }
  const float* tokens = x.data();
  const std::int32_t* experts = ids.data();
  cudaStream_t stream = nullptr;
  if (on_gpu) {
    void* memory[2] = {};
    check(cudaStreamCreate(&stream));
    check(cudaMalloc(&memory[0], x.size() * sizeof x[0]));
    check(cudaMalloc(&memory[1], ids.size() * sizeof ids[0]));
    check(cudaMemcpyAsync(memory[0], x.data(), x.size() * sizeof x[0], cudaMemcpyHostToDevice, stream));
    check(cudaMemcpyAsync(memory[1], ids.data(), ids.size() * sizeof ids[0], cudaMemcpyHostToDevice, stream));
    tokens = static_cast<float*>(memory[0]);
    experts = static_cast<std::int32_t*>(memory[1]);
  }

  const ferry::DispatchResult received =
      exchange.dispatch(ferry::Tokens::rows(tokens, kTokens, ferry::DType::fp32), experts, nullptr,
                        {.call = {.stream = {stream}}});
  if (on_gpu) exchange.synchronize({.stream = {stream}});

  const std::int64_t rows = received.host->total;
  std::vector<std::int8_t> values(static_cast<std::size_t>(rows * kHidden));
  std::vector<float> scales(static_cast<std::size_t>(rows * 4));
  std::vector<ferry::Source> source(static_cast<std::size_t>(rows));
  const auto fetch = [&](void* to, const void* from, std::size_t bytes) {
    if (!on_gpu) {
      std::memcpy(to, from, bytes);
      return;
    }
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
  };
  fetch(values.data(), received.parts[0].data, values.size());
  fetch(scales.data(), received.parts[1].data, scales.size() * sizeof scales[0]);
  fetch(source.data(), received.source, source.size() * sizeof source[0]);
  float largest = 0;
  for (std::size_t row = 0; row < source.size(); ++row) {
    for (int column = 0; column < kHidden; ++column) {
      const float decoded = scales[4 * row] * static_cast<float>(values[row * kHidden + column]);
      largest =
          std::fmax(largest, std::fabs(decoded - token_value(source[row].rank, source[row].token, column)));
    }
  }
  return largest;
}

}  // namespace

int main() {
  const ferry::Format format =
      ferry::register_format("int8_rows", ferry::cuda::make_encoder(part_bytes, EncodeInt8{}));
  int devices = 0;
  const bool has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  ferry::Group::threads(kRanks).run([&](const ferry::Rank& rank) {
    const float on_host = largest_error(rank, format, ferry::BackendKind::cpu);
    const float on_device = has_gpu ? largest_error(rank, format, ferry::BackendKind::cuda) : on_host;
    for (int turn = 0; turn < rank.size(); ++turn) {
      rank.barrier();
      if (turn != rank.index()) continue;
      std::printf("rank %d: %s, largest error %.4f%s\n", turn, ferry::to_string(format).c_str(), on_host,
                  on_device == on_host ? "" : ", different on the GPU");
    }
  });
}
