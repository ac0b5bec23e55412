// What the ranks of a bench are given: several sets of tokens, ids and weights, so that no call finds the
// last one's data in the caches.
//
// Values are whole numbers from -3 to 3 and weights are 1 or 0.5: every sum of a combine is then exact in
// every type and in any order, and one multiplication says what must come out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tools/ferry/bench/point.hpp"

namespace ferry::app {

class BenchInputs {
 public:
  static constexpr int kSets = 4;

  explicit BenchInputs(const BenchPoint& point);

  const std::int32_t* ids(int set, int rank) const { return &ids_[routes_before(set, rank)]; }   // [N, K]
  const float* weights(int set, int rank) const { return &weights_[routes_before(set, rank)]; }  // [N, K]

  // A token's values times `factor`, [H] of the point's type.
  void write_token(int set, int rank, std::int64_t token, float factor, std::byte* row) const;

  BenchRouting routing() const;

 private:
  std::size_t routes_before(int set, int rank) const;
  void count_set(int set, BenchRouting& sum) const;

  const BenchPoint& point_;
  std::vector<std::int32_t> ids_;  // [kSets, R, N, K]
  std::vector<float> weights_;     // [kSets, R, N, K]
  std::vector<float> pattern_;     // tokens' values are pieces of it
};

}  // namespace ferry::app
