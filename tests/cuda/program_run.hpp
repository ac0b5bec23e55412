// Runs of programs on device memory: inputs of a rank, and the results on host memory to compare with.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "cuda/device_test.hpp"
#include "ferry/evaluator.hpp"
#include "harness/random.hpp"

namespace ferry::contract {

inline constexpr int kColumns = 512, kMost = 24, kTopK = 3;
inline constexpr std::size_t kRowBytes = 2 * kColumns;

inline constexpr const char* kLayer = R"(
  program layer
  input x: tokens
  input ids: ids
  input weights: weights
  rows = dispatch(x, ids, weights)
  out: outputs = call experts(rows)
  y = combine(out, rows, rows)
  output y
)";

inline Config program_config(int ranks, int lanes, BackendKind backend) {
  return {.experts = 2 * ranks + 1,
          .top_k = kTopK,
          .hidden = kColumns,
          .max_tokens = kMost,
          .backend = backend,
          .lanes = lanes};
}

// The inputs of a rank for one run, and what the program makes of them on host memory.
struct ProgramRun {
  std::vector<std::byte> x, ids, weights, result;
  std::int64_t tokens = 0;

  ProgramRun(std::uint64_t seed, const Config& config, int rank, std::int64_t count) : tokens(count) {
    Random random = Random::of({seed, static_cast<std::uint64_t>(rank)});
    x.resize(static_cast<std::size_t>(count) * kRowBytes);
    for (std::size_t i = 0; i < x.size(); i += 2) {  // bf16 of -2 to 2
      const std::uint16_t value =
          static_cast<std::uint16_t>((random.chance(0.5) ? 0x8000 : 0) | random.between(0x3f00, 0x3fff));
      std::memcpy(x.data() + i, &value, 2);
    }
    std::vector<std::int32_t> chosen;
    std::vector<float> given;
    for (std::int64_t i = 0; i < count * kTopK; ++i) {
      chosen.push_back(random.between(-1, config.experts - 1));
      given.push_back(static_cast<float>(random.uniform()));
    }
    ids.assign(reinterpret_cast<const std::byte*>(chosen.data()),
               reinterpret_cast<const std::byte*>(chosen.data() + chosen.size()));
    weights.assign(reinterpret_cast<const std::byte*>(given.data()),
                   reinterpret_cast<const std::byte*>(given.data() + given.size()));
  }

  std::vector<ProgramValue> values(const void* x_at, const void* ids_at, const void* weights_at) const {
    return {ProgramValue::tokens(x_at, tokens, DType::bf16),
            ProgramValue::ids(static_cast<const std::int32_t*>(ids_at), tokens),
            ProgramValue::weights(static_cast<const float*>(weights_at), tokens)};
  }

  void run_on_host(Evaluator& layer) {
    const ProgramValue& y = *layer.run(values(x.data(), ids.data(), weights.data()))[0];
    const auto* const bytes = static_cast<const std::byte*>(y.data);
    result.assign(bytes, bytes + static_cast<std::size_t>(tokens) * kRowBytes);
  }
};

// The same inputs in device memory, at addresses that stay.
struct ProgramInputsOnDevice {
  DeviceBytes x{kMost * static_cast<std::int64_t>(kRowBytes)}, ids{kMost * kTopK * 4},
      weights{kMost * kTopK * 4};

  static void copy(const DeviceBytes& to, const std::vector<std::byte>& from, cudaStream_t stream) {
    if (!from.empty())
      require_success(cudaMemcpyAsync(to.data(), from.data(), from.size(), cudaMemcpyHostToDevice, stream),
                      "cudaMemcpyAsync");
  }
  void load(const ProgramRun& run, cudaStream_t stream) const {
    copy(x, run.x, stream);
    copy(ids, run.ids, stream);
    copy(weights, run.weights, stream);
    require_success(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  std::vector<ProgramValue> values(const ProgramRun& run) const {
    return run.values(x.data(), ids.data(), weights.data());
  }
};

inline void require_result(const ProgramValue& y, const ProgramRun& run, const std::string& what) {
  require_equal(y.rows, run.tokens, what, ": rows");
  std::vector<std::byte> found(run.result.size());
  if (!found.empty()) device::copy(found.data(), y.data, static_cast<std::int64_t>(found.size()));
  require_equal_bytes(found, run.result, 2, what);
}

}  // namespace ferry::contract
