#include "tools/ferry/run/swiglu.hpp"

#include <cmath>

#include "tools/ferry/common/random.hpp"
#include "tools/ferry/run/multiply.hpp"

namespace ferry::app {

namespace {

float silu(float x) {
  return x / (1.0F + std::exp(-x));
}

}  // namespace

std::int64_t ExpertWeights::bytes(int experts, int hidden, int inner) {
  return std::int64_t{experts} * 3 * hidden * inner * 4;
}

ExpertWeights::ExpertWeights(int experts, int hidden, int inner, std::uint64_t seed)
    : experts_(experts),
      hidden_(hidden),
      inner_(inner),
      values_(static_cast<std::size_t>(bytes(experts, hidden, inner) / 4)) {
  // A uniform value in [-1, 1) has variance 1/3, a token's too: this gives gate and up variance 1.
  const float into = 3.0F / std::sqrt(static_cast<float>(hidden));
  const float out = 3.0F / std::sqrt(static_cast<float>(inner));
  const std::size_t matrix = static_cast<std::size_t>(hidden) * static_cast<std::size_t>(inner);
  const std::uint64_t key = key_of(seed, 0x5eed);
  for (std::size_t i = 0; i < values_.size(); ++i)
    values_[i] = value_at(key, i) * (i / matrix % 3 == 2 ? out : into);
}

void Swiglu::run(int expert, const float* x, std::int64_t rows, float* out) {
  if (rows == 0) return;
  const int hidden = weights_->hidden(), inner = weights_->inner();
  gate_.resize(static_cast<std::size_t>(rows * inner));
  up_.resize(gate_.size());
  multiply(x, weights_->gate(expert), rows, hidden, inner, gate_.data());
  multiply(x, weights_->up(expert), rows, hidden, inner, up_.data());
  for (std::size_t i = 0; i < gate_.size(); ++i) gate_[i] = silu(gate_[i]) * up_[i];
  multiply(gate_.data(), weights_->down(expert), rows, inner, hidden, out);
}

}  // namespace ferry::app
