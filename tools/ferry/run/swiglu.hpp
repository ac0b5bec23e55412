// SwiGLU experts in fp32: down(silu(x gate) * (x up)), in the calling thread.
#pragma once

#include <cstdint>
#include <vector>

namespace ferry::app {

// The matrices of all experts, drawn from a seed and scaled so that outputs are about as large as inputs.
// Made once and read by every rank: threads share it, forked processes share its pages.
class ExpertWeights {
 public:
  ExpertWeights() = default;
  ExpertWeights(int experts, int hidden, int inner, std::uint64_t seed);

  static std::int64_t bytes(int experts, int hidden, int inner);

  int experts() const { return experts_; }
  int hidden() const { return hidden_; }
  int inner() const { return inner_; }
  const float* gate(int expert) const { return matrix(expert, 0); }  // [hidden, inner]
  const float* up(int expert) const { return matrix(expert, 1); }    // [hidden, inner]
  const float* down(int expert) const { return matrix(expert, 2); }  // [inner, hidden]

 private:
  const float* matrix(int expert, int number) const {
    return values_.data() + (std::int64_t{expert} * 3 + number) * hidden_ * inner_;
  }

  int experts_ = 0;
  int hidden_ = 0;
  int inner_ = 0;
  std::vector<float> values_;
};

class Swiglu {
 public:
  explicit Swiglu(const ExpertWeights& weights) : weights_(&weights) {}

  // out [rows, hidden] = expert(x [rows, hidden])
  void run(int expert, const float* x, std::int64_t rows, float* out);

 private:
  const ExpertWeights* weights_;
  std::vector<float> gate_, up_;  // [rows, inner]
};

}  // namespace ferry::app
