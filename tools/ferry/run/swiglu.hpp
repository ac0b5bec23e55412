// The SwiGLU experts of `ferry run` on the CPU, in fp32: down(silu(x gate) * (x up)).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ferry::app {

// The matrices of all experts, drawn from a seed and scaled so that outputs are about as large as inputs.
// Created once and read by all ranks: threads share it, forked processes share its pages.
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

// Applies one expert in the calling thread.
class Swiglu {
 public:
  explicit Swiglu(const ExpertWeights& weights) : weights_(&weights) {}

  // out [rows, hidden] = expert(x [rows, hidden])
  void run(int expert, const float* x, std::int64_t rows, float* out);

 private:
  const ExpertWeights* weights_;
  std::vector<float> gate_, up_;  // [rows, inner]
};

// Makes OpenBLAS use no threads of its own: the ranks are the threads.
void limit_blas_to_one_thread();

std::string blas_name();     // "OpenBLAS" or "plain loops"
std::string blas_version();  // version and build options of OpenBLAS; empty without it

}  // namespace ferry::app
