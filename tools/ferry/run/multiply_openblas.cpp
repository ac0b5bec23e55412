#include <cblas.h>

#include "tools/ferry/run/multiply.hpp"

namespace ferry::app {

void multiply(const float* a, const float* b, std::int64_t rows, int inner, int columns, float* out) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<blasint>(rows), columns, inner, 1.0F, a,
              inner, b, columns, 0.0F, out, columns);
}

void multiply_in_one_thread() {
  openblas_set_num_threads(1);
}

std::string multiply_name() {
  return "OpenBLAS";
}

std::string multiply_about() {
  return openblas_get_config();
}

}  // namespace ferry::app
