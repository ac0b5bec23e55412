// Inputs of mpi_alltoallv, and helpers that both of its variants use.
#pragma once

#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "backends/cpu/kernels/kernels.hpp"

namespace by_hand {

constexpr int kHidden = 7168, kExperts = 256, kTopK = 8, kSets = 4;
constexpr std::int64_t kRowBytes = 2 * kHidden;

// Follows a token in a message.
struct Tail {
  std::int32_t ids[kTopK];
  float weights[kTopK];
};
constexpr std::int64_t kMessageBytes = kRowBytes + static_cast<std::int64_t>(sizeof(Tail));

inline int rank_of(int expert, int ranks) {
  return expert / (kExperts / ranks);
}

// A function of set and rank, so that any rank can compute the inputs of any other.
struct Inputs {
  std::vector<std::int32_t> ids;  // [tokens, K], distinct in a token
  std::vector<float> weights;     // [tokens, K], 1 or 0.5
};

inline Inputs make_inputs(int set, int rank, int tokens) {
  std::mt19937 random(static_cast<std::uint32_t>(set * 1000 + rank + 1));
  std::vector<std::int32_t> experts(kExperts);
  std::iota(experts.begin(), experts.end(), 0);
  Inputs inputs;
  for (int token = 0; token < tokens; ++token) {
    for (int slot = 0; slot < kTopK; ++slot) {
      const auto other = slot + static_cast<int>(random() % static_cast<unsigned>(kExperts - slot));
      std::swap(experts[static_cast<std::size_t>(slot)], experts[static_cast<std::size_t>(other)]);
      inputs.ids.push_back(experts[static_cast<std::size_t>(slot)]);
      inputs.weights.push_back(random() % 2 == 0 ? 1.0f : 0.5f);
    }
  }
  return inputs;
}

inline void write_token(int set, int rank, std::int64_t token, float factor, void* row) {
  std::vector<float> values(kHidden);
  std::uint32_t state = static_cast<std::uint32_t>(((set * 64 + rank) << 16) + token + 1);
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = (static_cast<float>((state >> 16) % 7) - 3.0f) * factor;
  }
  ferry::cpu::kernels().convert_row(row, ferry::DType::bf16, values.data(), ferry::DType::fp32, kHidden,
                                    ferry::cpu::Store::cached);
}

inline void sum(void* out, const std::vector<const void*>& rows, const float* weights) {
  ferry::cpu::kernels().weighted_sum({.out = out,
                                      .rows = rows.data(),
                                      .weights = weights,
                                      .count = static_cast<int>(rows.size()),
                                      .columns = kHidden,
                                      .store = ferry::cpu::Store::streaming});
}

inline std::vector<int> starts_of(const std::vector<int>& counts) {
  std::vector<int> starts(counts.size() + 1);
  std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
  return starts;
}

struct Options {
  bool row_per_rank = true;  // false: one row per route
  int tokens = 2048;
  int repetitions = 20;
};

}  // namespace by_hand
