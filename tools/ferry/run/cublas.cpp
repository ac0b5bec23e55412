#include "tools/ferry/run/cublas.hpp"

#include <dlfcn.h>
#include <fmt/core.h>
#include <library_types.h>

#include <cerrno>
#include <string>

#include "ferry/error.hpp"

namespace ferry::app {

namespace {

// cuBLAS's own numbers, the same since CUDA 11. Its header is not needed for the few functions used, so the
// program is built where only the compiler of CUDA is.
constexpr int kAsItLies = 0;     // CUBLAS_OP_N
constexpr int kSumsInFp32 = 68;  // CUBLAS_COMPUTE_32F
constexpr int kDefaultWay = -1;  // CUBLAS_GEMM_DEFAULT

struct Cublas {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*set_stream)(void* handle, cudaStream_t stream);
  int (*gemm)(void* handle, int operation_a, int operation_b, int m, int n, int k, const void* alpha,
              const void* a, cudaDataType a_type, int a_leading, const void* b, cudaDataType b_type,
              int b_leading, const void* beta, void* c, cudaDataType c_type, int c_leading, int sums,
              int way);
};

// The version that belongs to the toolkit: by the loader's own search, then where the toolkit is.
void* open_library() {
  const std::string name = fmt::format("libcublas.so.{}", CUDART_VERSION / 1000);
  for (const std::string& place : {name, std::string(FERRY_CUDA_LIBRARIES "/") + name}) {
    if (void* library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  throw UnsupportedError(fmt::format(
      "the experts of a run on GPUs need cuBLAS, and {} is found neither by the loader nor in {}: install it "
      "with the CUDA toolkit, or name its folder in LD_LIBRARY_PATH",
      name, FERRY_CUDA_LIBRARIES));
}

template <class Function>
void find(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw UnsupportedError(fmt::format("cuBLAS has no {}", name));
}

const Cublas& cublas() {
  static const Cublas loaded = [] {
    void* library = open_library();  // stays: its handles may outlive any order of destruction
    Cublas functions{};
    find(functions.create, library, "cublasCreate_v2");
    find(functions.destroy, library, "cublasDestroy_v2");
    find(functions.set_stream, library, "cublasSetStream_v2");
    find(functions.gemm, library, "cublasGemmEx");
    return functions;
  }();
  return loaded;
}

void require_success(int status, const char* function) {
  if (status != 0)
    throw SystemError(fmt::format("{} of cuBLAS failed with status {}", function, status), EIO);
}

cudaDataType data_type(DType type) {
  if (type == DType::fp32) return CUDA_R_32F;
  return type == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F;
}

}  // namespace

DeviceMultiply::DeviceMultiply(cudaStream_t stream) {
  require_success(cublas().create(&handle_), "cublasCreate");
  const int status = cublas().set_stream(handle_, stream);
  if (status != 0) cublas().destroy(handle_);
  require_success(status, "cublasSetStream");
}

DeviceMultiply::~DeviceMultiply() {
  cublas().destroy(handle_);
}

// cuBLAS numbers elements by columns first, so rows are columns to it: out^T = b^T a^T.
void DeviceMultiply::multiply(const DeviceProduct& product) const {
  const float one = 1.0F, zero = 0.0F;
  const cudaDataType type = data_type(product.type);
  require_success(cublas().gemm(handle_, kAsItLies, kAsItLies, product.columns,
                                static_cast<int>(product.rows), product.inner, &one, product.b, type,
                                product.columns, product.a, type, product.inner, &zero, product.out,
                                data_type(product.out_type), product.columns, kSumsInFp32, kDefaultWay),
                  "cublasGemmEx");
}

}  // namespace ferry::app
