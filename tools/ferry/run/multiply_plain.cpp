#include <algorithm>

#include "tools/ferry/run/multiply.hpp"

namespace ferry::app {

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

void multiply_in_one_thread() {}

std::string multiply_name() {
  return "plain loops";
}

std::string multiply_about() {
  return {};
}

}  // namespace ferry::app
