// Products of matrices on a GPU for the experts, by cuBLAS, which is found at run time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ferry/types.hpp"

namespace ferry::app {

// Operands of a product, dense: out [rows, columns] = a [rows, inner] b [inner, columns].
struct DeviceProduct {
  const void* a;
  const void* b;
  void* out;
  std::int64_t rows;
  int inner, columns;
  DType type;      // of a and b
  DType out_type;  // `type` or fp32
};

class DeviceMultiply {
 public:
  // On the thread's current device; products run on `stream`. Throws UnsupportedError without cuBLAS.
  explicit DeviceMultiply(cudaStream_t stream);
  ~DeviceMultiply();
  DeviceMultiply(const DeviceMultiply&) = delete;
  DeviceMultiply& operator=(const DeviceMultiply&) = delete;

  // Puts a product on the stream. Sums are fp32, in an order that is the library's own.
  void multiply(const DeviceProduct& product) const;

 private:
  void* handle_ = nullptr;
};

}  // namespace ferry::app
