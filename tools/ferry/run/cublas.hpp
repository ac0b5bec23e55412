// Matrix products on a GPU by cuBLAS, which is loaded at run time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ferry/types.hpp"

namespace ferry::app {

// Dense row-major matrices: out [rows, columns] = a [rows, inner] b [inner, columns].
struct MatrixProduct {
  const void* a;
  const void* b;
  void* out;
  std::int64_t rows;
  int inner, columns;
  DType type;      // of a and b
  DType out_type;  // `type` or fp32
};

class Cublas {
 public:
  // Uses the current GPU; products run on `stream`.
  // @throws UnsupportedError  cuBLAS was not found
  explicit Cublas(cudaStream_t stream);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  // Enqueues a product. Sums are fp32, in an order that cuBLAS chooses.
  void multiply(const MatrixProduct& product) const;

 private:
  void* handle_ = nullptr;
};

}  // namespace ferry::app
