// The experts of `ferry run` with programs, run on the host: groups of any sizes, types and encodings against
// plain loops.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "kernels_on_host/grid.hpp"
#include "seed.hpp"
#include "tools/ferry/run/grouped_experts.cuh"

namespace ferry::app {
namespace {

// Random groups of rows with gaps between them, as expert_padded and alignment leave, and their experts.
struct GroupedCase {
  std::mt19937_64 random;
  std::int64_t hidden, inner, capacity = 0;
  std::vector<std::int32_t> counts, offsets;
  std::vector<float> values, weights, factors, out;

  GroupedCase(std::uint64_t seed, int groups, std::int64_t columns, std::int64_t inner_columns)
      : random(seed), hidden(columns), inner(inner_columns) {
    for (int group = 0; group < groups; ++group) {
      counts.push_back(random() % 3 == 0 ? 0 : static_cast<std::int32_t>(random() % 150));
      offsets.push_back(static_cast<std::int32_t>(capacity));
      capacity += counts.back() + static_cast<std::int64_t>(random() % 3);
      factors.push_back(static_cast<float>(group) - 1.5f);
    }
    values = drawn(capacity * hidden);
    weights = drawn(3 * groups * hidden * inner);
    out.assign(static_cast<std::size_t>(capacity * hidden), kUntouched);
  }

  std::vector<float> drawn(std::int64_t count) {
    std::vector<float> made;
    for (std::int64_t i = 0; i < count; ++i)
      made.push_back(static_cast<float>(static_cast<int>(random() % 33) - 16) / 16);
    return made;
  }

  GpuRows rows() const {
    GpuRows made{};
    made.values = values.data();
    made.type = DType::fp32;
    made.hidden = hidden;
    return made;
  }
  GpuGroups groups() const { return {counts.data(), offsets.data(), static_cast<int>(counts.size())}; }

  template <class Body>
  void run(Body kernel) {
    on_host::Grid grid(random());
    grid.add(1 + static_cast<unsigned>(random() % 5), kProductThreads, [kernel](unsigned) { kernel(); });
    grid.run();
  }

  // Calls expect(group, row) for each row of a group; the others must be untouched.
  template <class Expect>
  void check(Expect expect) const {
    std::vector<bool> written(static_cast<std::size_t>(capacity));
    for (std::size_t group = 0; group < counts.size(); ++group) {
      for (std::int64_t row = offsets[group]; row < offsets[group] + counts[group]; ++row) {
        written[static_cast<std::size_t>(row)] = true;
        expect(static_cast<std::int64_t>(group), row);
      }
    }
    for (std::int64_t row = 0; row < capacity; ++row) {
      if (written[static_cast<std::size_t>(row)]) continue;
      EXPECT_EQ(at(out, row, 0), kUntouched) << "row " << row;
    }
  }
  float at(const std::vector<float>& from, std::int64_t row, std::int64_t column) const {
    return from[static_cast<std::size_t>(row * hidden + column)];
  }

  static constexpr float kUntouched = -77;
};

TEST(GroupedExperts, ScaleTheRowsOfEachGroup) {
  for (std::uint64_t number = 0; number < 6; ++number) {
    GroupedCase c(test::seed() + number, 1 + static_cast<int>(number), 40, 1);
    c.run([&] { scale_rows_of_groups(c.rows(), c.groups(), c.factors.data(), c.out.data()); });
    c.check([&](std::int64_t group, std::int64_t row) {
      for (std::int64_t column = 0; column < c.hidden; ++column)
        EXPECT_EQ(c.at(c.out, row, column),
                  c.at(c.values, row, column) * c.factors[static_cast<std::size_t>(group)]);
    });
  }
}

TEST(GroupedExperts, SwigluOfEachGroup) {
  for (const auto& [hidden, inner] : {std::pair{40, 24}, {64, 64}, {130, 70}}) {
    GroupedCase c(test::seed() + static_cast<std::uint64_t>(inner), 4, hidden, inner);
    std::vector<float> activated(static_cast<std::size_t>(c.capacity * inner));
    const GpuSwiglu swiglu{c.weights.data(), inner, activated.data()};
    auto memory = std::make_shared<std::vector<ProductMemory>>(5);  // of each block
    c.run([&, memory] { gate_and_up(c.rows(), c.groups(), swiglu, &(*memory)[blockIdx.x]); });
    c.run([&, memory] { down(c.rows(), c.groups(), swiglu, c.out.data(), &(*memory)[blockIdx.x]); });
    c.check([&](std::int64_t group, std::int64_t row) {
      const float* const gate = c.weights.data() + 3 * group * hidden * inner;
      const float *const up = gate + hidden * inner, *const down_matrix = up + hidden * inner;
      std::vector<double> made;
      for (std::int64_t column = 0; column < inner; ++column) {
        double g = 0, u = 0;
        for (std::int64_t k = 0; k < hidden; ++k) {
          g += double{c.at(c.values, row, k)} * gate[k * inner + column];
          u += double{c.at(c.values, row, k)} * up[k * inner + column];
        }
        made.push_back(g / (1 + std::exp(-g)) * u);
      }
      for (std::int64_t column = 0; column < hidden; ++column) {
        double sum = 0;
        for (std::int64_t k = 0; k < inner; ++k)
          sum += made[static_cast<std::size_t>(k)] * down_matrix[k * hidden + column];
        EXPECT_NEAR(c.at(c.out, row, column), sum, 1e-4 * (1 + std::abs(sum))) << "row " << row;
      }
    });
  }
}

}  // namespace
}  // namespace ferry::app
