#include "tools/ferry/run/swiglu.hpp"

#include <algorithm>
#include <cmath>

#include "tools/ferry/common/random.hpp"

#ifdef FERRY_OPENBLAS
#include <cblas.h>
#endif

namespace ferry::app {

namespace {

float silu(float x) {
  return x / (1.0F + std::exp(-x));
}

// out [rows, columns] = a [rows, inner] b [inner, columns], row-major.
#ifdef FERRY_OPENBLAS
void multiply(const float* a, const float* b, std::int64_t rows, int inner, int columns, float* out) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<blasint>(rows), columns, inner, 1.0F, a,
              inner, b, columns, 0.0F, out, columns);
}
#else
void multiply(const float* a, const float* b, std::int64_t rows, int inner, int columns, float* out) {
  std::fill_n(out, rows * columns, 0.0F);
  for (std::int64_t row = 0; row < rows; ++row) {
    float* const to = out + row * columns;
    for (int i = 0; i < inner; ++i) {
      const float factor = a[row * inner + i];
      const float* const from = b + std::int64_t{i} * columns;
      for (int column = 0; column < columns; ++column) to[column] += factor * from[column];
    }
  }
}
#endif

}  // namespace

std::int64_t ExpertWeights::bytes(int experts, int hidden, int inner) {
  return std::int64_t{experts} * 3 * hidden * inner * 4;
}

ExpertWeights::ExpertWeights(int experts, int hidden, int inner, std::uint64_t seed)
    : experts_(experts),
      hidden_(hidden),
      inner_(inner),
      values_(static_cast<std::size_t>(bytes(experts, hidden, inner) / 4)) {
  // Uniform values in [-1, 1) have variance 1/3, as do the tokens' values. These factors give gate and up
  // variance 1.
  const float input_scale = 3.0F / std::sqrt(static_cast<float>(hidden));
  const float output_scale = 3.0F / std::sqrt(static_cast<float>(inner));
  const std::size_t matrix = static_cast<std::size_t>(hidden) * static_cast<std::size_t>(inner);
  const std::uint64_t key = key_of(seed, 0x5eed);
  for (std::size_t i = 0; i < values_.size(); ++i)
    values_[i] = value_at(key, i) * (i / matrix % 3 == 2 ? output_scale : input_scale);
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

#ifdef FERRY_OPENBLAS
void limit_blas_to_one_thread() {
  openblas_set_num_threads(1);
}
std::string blas_name() {
  return "OpenBLAS";
}
std::string blas_version() {
  return openblas_get_config();
}
#else
void limit_blas_to_one_thread() {}
std::string blas_name() {
  return "plain loops";
}
std::string blas_version() {
  return {};
}
#endif

}  // namespace ferry::app
