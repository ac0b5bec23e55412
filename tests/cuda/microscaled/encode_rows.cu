#include "backends/cuda/dispatch/routing.cuh"
#include "backends/cuda/dispatch/send_row.cuh"
#include "cuda/microscaled/encode_rows.hpp"
#include "harness/require_success.hpp"

namespace ferry::contract {
namespace {

using device::require_success;

// A warp encodes a row, whose values are first narrowed to their type.
template <DType kType, int kDeep, ElementType kElement>
__global__ void encode(const std::uint32_t* bits, std::byte* rows, std::byte* values, std::byte* scales,
                       Encoding encoding) {
  constexpr int kColumns = kMicroscaledColumns;
  const std::int64_t row = blockIdx.x;
  std::byte* const in = rows + row * kColumns * cuda::value_bytes(kType);
  for (int column = static_cast<int>(threadIdx.x); column < kColumns; column += 32) {
    const std::uint32_t value = bits[row * kColumns + column];
    if constexpr (kType == DType::fp32) {
      reinterpret_cast<std::uint32_t*>(in)[column] = value;
    } else {
      reinterpret_cast<std::uint16_t*>(in)[column] = static_cast<std::uint16_t>(value);
    }
  }
  __syncwarp();
  std::byte* const to_scales = scales + row * encoding.scale_bytes(kColumns);
  cuda::send_mx<kType, kDeep, kElement>(in, values + row * encoding.value_bytes(kColumns), 1u, {0, kColumns},
                                        encoding, [&](bool stores, std::int64_t offset, std::uint32_t word) {
                                          if (stores)
                                            *reinterpret_cast<std::uint32_t*>(to_scales + offset) = word;
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
auto kernel_of(DType type, bool whole_rows) {
  if (type == DType::fp32) return &encode<DType::fp32, 8, kElement>;
  if (type == DType::bf16)
    return whole_rows ? &encode<DType::bf16, 14, kElement> : &encode<DType::bf16, 8, kElement>;
  return whole_rows ? &encode<DType::fp16, 14, kElement> : &encode<DType::fp16, 8, kElement>;
}

}  // namespace

MicroscaledRows encode_on_device(const std::vector<std::uint32_t>& rows, DType type, const Format& format,
                                 bool whole_rows) {
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
  const auto kernel = encoding.element == ElementType::e4m3 ? kernel_of<ElementType::e4m3>(type, whole_rows)
                                                            : kernel_of<ElementType::e2m1>(type, whole_rows);
  kernel<<<static_cast<unsigned>(count), 32>>>(bits, in, values, scales, encoding);
  require_success(cudaGetLastError(), "launching the encoder");
  copy_and_free(result.values, values);
  copy_and_free(result.scales, scales);
  require_success(cudaFree(in), "cudaFree");
  require_success(cudaFree(bits), "cudaFree");
  return result;
}

}  // namespace ferry::contract
