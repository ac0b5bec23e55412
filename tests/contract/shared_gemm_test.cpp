// One grouped GEMM over the rows of shared and routed experts alike, between dispatch and combine, against a
// dense layer. All numbers are small integers or halves, so sums are exact in any order.
#include <gtest/gtest.h>

#include <vector>

#include "harness/harness.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

constexpr int kColumns = 16;  // H

using Matrix = std::vector<float>;  // [H, H]

// Matrices of all experts, the shared ones last, as group_expert numbers them.
std::vector<Matrix> expert_matrices(int experts) {
  Random random = Random::of({11});
  std::vector<Matrix> matrices(static_cast<std::size_t>(experts));
  for (Matrix& matrix : matrices) {
    for (int i = 0; i < kColumns * kColumns; ++i) matrix.push_back(static_cast<float>(random.below(3)) - 1);
  }
  return matrices;
}

// y += weight * (x M)
void multiply(const float* x, const Matrix& m, float weight, float* y) {
  for (std::size_t column = 0; column < kColumns; ++column) {
    float sum = 0;
    for (std::size_t k = 0; k < kColumns; ++k) sum += x[k] * m[k * kColumns + column];
    y[column] += weight * sum;
  }
}

// The program's experts, in one call: out = x M for the rows of every group.
void grouped_gemm(const DispatchResult& received, const std::vector<Matrix>& matrices, float* out) {
  const auto* x = static_cast<const float*>(received.data);
  for (int group = 0; group < received.groups; ++group) {
    const Matrix& matrix = matrices[static_cast<std::size_t>(received.group_expert[group])];
    const std::int64_t first = received.row_offsets[group];
    for (std::int64_t row = first; row < first + received.counts[group]; ++row) {
      std::fill_n(out + row * kColumns, kColumns, 0.0f);
      multiply(x + row * kColumns, matrix, 1, out + row * kColumns);
    }
  }
}

StepInputs whole_numbers(StepInputs step) {
  Random random = Random::of({12});
  for (oracle::RankInputs& inputs : step.inputs.ranks) {
    for (std::size_t at = 0; at < inputs.parts[0].size(); at += sizeof(float))
      oracle::store(DType::fp32, static_cast<float>(random.below(7)) - 3, inputs.parts[0].data() + at);
    for (float& weight : inputs.weights) weight = static_cast<float>(random.below(5)) / 2;
  }
  return step;
}

std::vector<std::byte> dense_layer(const Config& config, const oracle::RankInputs& inputs,
                                   const std::vector<Matrix>& matrices) {
  std::vector<std::byte> result(inputs.parts[0].size());
  for (std::int64_t token = 0; token < inputs.tokens; ++token) {
    std::vector<float> x, y(kColumns, 0.0f);
    for (std::int64_t c = 0; c < kColumns; ++c)
      x.push_back(oracle::load(DType::fp32, inputs.parts[0].data() + 4 * (token * kColumns + c)));
    for (int slot = 0; slot < config.top_k; ++slot) {
      const auto route = static_cast<std::size_t>(token * config.top_k + slot);
      const std::int64_t expert = inputs.ids[route];
      if (expert >= 0)
        multiply(x.data(), matrices[static_cast<std::size_t>(expert)], inputs.weights[route], y.data());
    }
    for (int s = 0; s < config.shared_experts; ++s)
      multiply(x.data(), matrices[static_cast<std::size_t>(config.experts + s)], 1, y.data());
    for (std::int64_t c = 0; c < kColumns; ++c)
      oracle::store(DType::fp32, y[static_cast<std::size_t>(c)], result.data() + 4 * (token * kColumns + c));
  }
  return result;
}

TEST_P(Contract, OneGroupedGemmCoversSharedAndRoutedRows) {
  for (const int shared : {1, 2}) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
      TestCase c = small_case(static_cast<std::uint64_t>(shared));
      c.ranks = 3;
      c.tokens = {5, 0, 7};
      c.config.experts = 7;
      c.config.top_k = 3;
      c.config.max_tokens = 7;
      c.config.hidden = kColumns;
      c.config.alignment = 4;
      c.config.layout = layout;
      c.config.shared_experts = shared;
      c.config.format = Format::fp32();
      c.config.combine_type = c.type = c.outputs = c.result = DType::fp32;
      c.masked = 0.2;
      const StepInputs step = whole_numbers(make_inputs(c));
      const std::vector<Matrix> matrices = expert_matrices(c.config.experts + shared);
      run(c.ranks, describe(c), [&](Rank rank) {
        SyncExchange exchange(rank, c.config);
        DispatchRun dispatch(exchange, c, step);
        dispatch.run();
        const DispatchResult& received = dispatch.received();
        const std::int64_t rows = received.capacity * (layout == Layout::expert_padded ? received.groups : 1);
        GuardedBuffer outputs(rows * kColumns * 4, kNan);
        grouped_gemm(received, matrices, outputs.as<float>());
        const std::vector<std::byte> expected =
            dense_layer(c.config, step.inputs.ranks[static_cast<std::size_t>(rank.index())], matrices);
        GuardedBuffer result(static_cast<std::int64_t>(expected.size()));
        exchange.combine({.data = outputs.data(), .type = DType::fp32}, received.plan,
                         {.data = result.data(), .type = DType::fp32}, {.row_weights = received.weight});
        result.require_contents(expected, sizeof(float), "result");
      });
    }
  }
}

}  // namespace
}  // namespace ferry::contract
