#include "tools/ferry/run/cublas.hpp"

#include <fmt/core.h>
#include <library_types.h>

#include <cerrno>
#include <string>

#include "base/shared_library.hpp"
#include "ferry/error.hpp"

namespace ferry::app {

namespace {

// cuBLAS's enumerators, unchanged since CUDA 11. Declaring them here avoids its header, so that the program
// builds with the CUDA compiler alone.
constexpr int kNoTranspose = 0;        // CUBLAS_OP_N
constexpr int kComputeFp32 = 68;       // CUBLAS_COMPUTE_32F
constexpr int kDefaultAlgorithm = -1;  // CUBLAS_GEMM_DEFAULT

struct Functions {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*set_stream)(void* handle, cudaStream_t stream);
  int (*gemm)(void* handle, int operation_a, int operation_b, int m, int n, int k, const void* alpha,
              const void* a, cudaDataType a_type, int a_leading, const void* b, cudaDataType b_type,
              int b_leading, const void* beta, void* c, cudaDataType c_type, int c_leading, int compute,
              int algorithm);
};

// The toolkit's version of cuBLAS, searched by the loader first and then in the toolkit's folder.
SharedLibrary open_cublas() {
  const std::string name = fmt::format("libcublas.so.{}", CUDART_VERSION / 1000);
  if (SharedLibrary library = open_first({name, FERRY_CUDA_LIBRARIES "/" + name})) return library;
  throw UnsupportedError(
      fmt::format("the experts of a run on GPUs need cuBLAS, but {} was found neither by the loader nor in "
                  "{}: install it "
                  "with the CUDA toolkit, or add its folder to LD_LIBRARY_PATH",
                  name, FERRY_CUDA_LIBRARIES));
}

template <class Function>
void find(Function& function, const SharedLibrary& library, const char* name) {
  if (!library.find(function, name)) throw UnsupportedError(fmt::format("cuBLAS has no {}", name));
}

const Functions& functions() {
  static const Functions loaded = [] {
    const SharedLibrary library = open_cublas();
    Functions found{};
    find(found.create, library, "cublasCreate_v2");
    find(found.destroy, library, "cublasDestroy_v2");
    find(found.set_stream, library, "cublasSetStream_v2");
    find(found.gemm, library, "cublasGemmEx");
    return found;
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

Cublas::Cublas(cudaStream_t stream) {
  require_success(functions().create(&handle_), "cublasCreate");
  const int status = functions().set_stream(handle_, stream);
  if (status != 0) functions().destroy(handle_);
  require_success(status, "cublasSetStream");
}

Cublas::~Cublas() {
  functions().destroy(handle_);
}

// cuBLAS is column-major, so it sees the transposed matrices: out^T = b^T a^T.
void Cublas::multiply(const MatrixProduct& product) const {
  const float one = 1.0F, zero = 0.0F;
  const cudaDataType type = data_type(product.type);
  require_success(
      functions().gemm(handle_, kNoTranspose, kNoTranspose, product.columns, static_cast<int>(product.rows),
                       product.inner, &one, product.b, type, product.columns, product.a, type, product.inner,
                       &zero, product.out, data_type(product.out_type), product.columns, kComputeFp32,
                       kDefaultAlgorithm),
      "cublasGemmEx");
}

}  // namespace ferry::app
