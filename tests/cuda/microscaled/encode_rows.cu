#include "backends/cuda/dispatch/routing.cuh"
#include "backends/cuda/dispatch/send_row.cuh"
#include "cuda/microscaled/encode_rows.hpp"
#include "harness/require_success.hpp"

namespace ferry::contract {
namespace {

using device::require_success;

// Arguments of the kernel.
struct EncodeArguments {
  const std::uint32_t* bits;
  std::byte *rows, *values, *scales;
  Encoding encoding;
  float g;  // of nvfp4
};

// [warp] Narrows the values of the block's row to their type, and returns it.
template <DType kType>
__device__ const std::byte* narrowed_row(const EncodeArguments& call) {
  constexpr int kColumns = kMicroscaledColumns;
  const std::int64_t row = blockIdx.x;
  std::byte* const in = call.rows + row * kColumns * cuda::value_bytes(kType);
  for (int column = static_cast<int>(threadIdx.x); column < kColumns; column += 32) {
    const std::uint32_t value = call.bits[row * kColumns + column];
    if constexpr (kType == DType::fp32) {
      reinterpret_cast<std::uint32_t*>(in)[column] = value;
    } else {
      reinterpret_cast<std::uint16_t*>(in)[column] = static_cast<std::uint16_t>(value);
    }
  }
  __syncwarp();
  return in;
}

// A warp encodes a row.
template <DType kType, int kDeep, ElementType kElement>
__global__ void encode_mx(const EncodeArguments call) {
  constexpr int kColumns = kMicroscaledColumns;
  const std::byte* const in = narrowed_row<kType>(call);
  std::byte* const to_scales = call.scales + blockIdx.x * call.encoding.scale_bytes(kColumns);
  cuda::send_mx<kType, kDeep, kElement>(in, call.values + blockIdx.x * call.encoding.value_bytes(kColumns),
                                        1u, {0, kColumns}, call.encoding,
                                        [&](bool stores, std::int64_t offset, std::uint32_t word) {
                                          if (stores)
                                            *reinterpret_cast<std::uint32_t*>(to_scales + offset) = word;
                                        });
}

template <DType kType, int kAtOnce>
__global__ void encode_nvfp4(const EncodeArguments call) {
  constexpr int kColumns = kMicroscaledColumns;
  const std::byte* const in = narrowed_row<kType>(call);
  std::byte* const to_scales = call.scales + blockIdx.x * call.encoding.scale_bytes(kColumns);
  cuda::send_nvfp4<kType, kAtOnce>(in, call.values + blockIdx.x * call.encoding.value_bytes(kColumns), 1u,
                                   {0, kColumns}, call.g,
                                   [&](bool stores, std::int64_t offset, std::uint32_t word) {
                                     if (stores) *reinterpret_cast<std::uint32_t*>(to_scales + offset) = word;
                                   });
}

template <class T>
T* device_array(std::size_t count) {
  T* array = nullptr;
  require_success(cudaMalloc(&array, count * sizeof(T)), "cudaMalloc");
  require_success(cudaMemset(array, 0xA5, count * sizeof(T)), "cudaMemset");
  return array;
}

template <class T>
void copy_and_free(std::vector<T>& to, void* from) {
  require_success(cudaMemcpy(to.data(), from, to.size() * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  require_success(cudaFree(from), "cudaFree");
}

template <ElementType kElement>
auto mx_kernel_of(DType type, bool whole_rows) {
  if (type == DType::fp32) return &encode_mx<DType::fp32, 8, kElement>;
  if (type == DType::bf16)
    return whole_rows ? &encode_mx<DType::bf16, 14, kElement> : &encode_mx<DType::bf16, 8, kElement>;
  return whole_rows ? &encode_mx<DType::fp16, 14, kElement> : &encode_mx<DType::fp16, 8, kElement>;
}

auto kernel_of(const Encoding& encoding, DType type, bool whole_rows) {
  if (encoding.is_two_level())
    return type == DType::fp32 ? &encode_nvfp4<DType::fp32, 1>
           : type == DType::bf16
               ? (whole_rows ? &encode_nvfp4<DType::bf16, 2> : &encode_nvfp4<DType::bf16, 4>)
               : (whole_rows ? &encode_nvfp4<DType::fp16, 2> : &encode_nvfp4<DType::fp16, 4>);
  return encoding.element == ElementType::e4m3 ? mx_kernel_of<ElementType::e4m3>(type, whole_rows)
                                               : mx_kernel_of<ElementType::e2m1>(type, whole_rows);
}

}  // namespace

MicroscaledRows encode_on_device(const std::vector<std::uint32_t>& rows, DType type, const Format& format,
                                 bool whole_rows, float g) {
  const Encoding encoding = encoding_of(format);
  const std::size_t count = rows.size() / kMicroscaledColumns;
  MicroscaledRows result;
  result.values.resize(count * static_cast<std::size_t>(encoding.value_bytes(kMicroscaledColumns)));
  result.scales.resize(count * static_cast<std::size_t>(encoding.scale_bytes(kMicroscaledColumns)));
  auto* bits = device_array<std::uint32_t>(rows.size());
  auto* in = device_array<std::byte>(rows.size() * static_cast<std::size_t>(bytes_of(type)));
  auto* values = device_array<std::byte>(result.values.size());
  auto* scales = device_array<std::byte>(result.scales.size());
  require_success(cudaMemcpy(bits, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  const EncodeArguments call{bits, in, values, scales, encoding, g};
  kernel_of(encoding, type, whole_rows)<<<static_cast<unsigned>(count), 32>>>(call);
  require_success(cudaGetLastError(), "launching the encoder");
  copy_and_free(result.values, values);
  copy_and_free(result.scales, scales);
  require_success(cudaFree(in), "cudaFree");
  require_success(cudaFree(bits), "cudaFree");
  return result;
}

}  // namespace ferry::contract
