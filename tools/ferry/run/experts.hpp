// The experts of one rank at work on its arrivals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "memory/local.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/swiglu.hpp"

namespace ferry::app {

// What expert e of the exact pass multiplies with: a signed power of two, so that the product of a token's
// value is exact and ten neighbouring experts differ.
constexpr float factor_of(int expert) {
  constexpr float kPowers[] = {0.25F, 0.5F, 1.0F, 2.0F, 4.0F};
  return expert / 5 % 2 == 0 ? kPowers[expert % 5] : -kPowers[expert % 5];
}

class Experts {
 public:
  // `capacity`: rows that may arrive, of all groups together. Memory is taken as rows are touched.
  Experts(const Job& job, int rank, std::int64_t capacity);

  // Both write one row of Job::type for every arrived one. In rank_major that row is the sum over the token's
  // experts here: slots ascending, sum = fma(weight, v, sum), v rounded to Job::type first, as partial has
  // it.
  void multiply(const DispatchResult& received);
  void swiglu(const DispatchResult& received);

  Outputs outputs() const { return {.data = outputs_.data(), .type = job_.type}; }

 private:
  struct Routed {
    std::int64_t row;
    float weight;
  };

  void read(const DispatchResult& received, std::int64_t row, float* values) const;
  void read_fp8(const DispatchResult& received, std::int64_t row, float* values) const;
  void write(std::int64_t row, const float* values);
  void add(float weight, float* values, float* sum) const;
  void group_rows(const DispatchResult& received);
  void apply_swiglu(const DispatchResult& received, int expert, const std::vector<Routed>& rows);

  const Job& job_;
  int rank_;
  bool rank_major_;
  std::int64_t hidden_;
  LocalMemory outputs_;                         // [capacity, hidden] of Job::type
  LocalMemory sums_;                            // rank_major: [capacity, hidden] fp32
  std::vector<std::vector<Routed>> by_expert_;  // [local experts]
  std::vector<float> in_, out_;
  Swiglu function_;
};

}  // namespace ferry::app
