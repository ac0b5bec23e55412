#include "cuda/device_compare.hpp"
#include "harness/guarded_buffer.hpp"
#include "harness/require_success.hpp"

namespace ferry::contract {

using device::require_success;

struct DifferenceRecord {
  unsigned long long differences;  // bytes
  unsigned int taken;              // whether the fields below are of a difference
  int pair, got, expected;
  std::int64_t call, offset;
};

namespace {

constexpr int kBlocks = 16, kThreads = 256;
constexpr auto kPoisonByte = static_cast<unsigned char>(kPoison);

// Calls whole(offset) for each 16 bytes, and tail(offset) for each byte that is left.
template <class Whole, class Tail>
__device__ void for_each_element(const ArrayPairs::Pair& pair, Whole whole, Tail tail) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x,
                     step = std::int64_t{kBlocks} * kThreads;
  const bool aligned =
      (reinterpret_cast<std::uintptr_t>(pair.to) | reinterpret_cast<std::uintptr_t>(pair.from)) % 16 == 0;
  const std::int64_t wholes = aligned ? pair.bytes / 16 : 0;
  for (std::int64_t i = first; i < wholes; i += step) whole(16 * i);
  for (std::int64_t i = 16 * wholes + first; i < pair.bytes; i += step) tail(i);
}

__device__ uint4 poison() {
  constexpr std::uint32_t kWord = kPoisonByte * 0x01010101u;
  return make_uint4(kWord, kWord, kWord, kWord);
}

__global__ void copy(ArrayPairs pairs) {
  for (int p = 0; p < pairs.count; ++p) {
    const ArrayPairs::Pair& pair = pairs.pair[p];
    for_each_element(
        pair,
        [&](std::int64_t at) {
          *reinterpret_cast<uint4*>(pair.to + at) =
              pair.from == nullptr ? poison() : *reinterpret_cast<const uint4*>(pair.from + at);
        },
        [&](std::int64_t at) {
          pair.to[at] = pair.from == nullptr ? std::byte{kPoisonByte} : pair.from[at];
        });
  }
}

__global__ void compare_pairs(ArrayPairs pairs, std::int64_t call, DifferenceRecord* record) {
  for (int p = 0; p < pairs.count; ++p) {
    const ArrayPairs::Pair& pair = pairs.pair[p];
    const auto compare_byte = [&](std::int64_t at) {
      const int got = static_cast<int>(pair.to[at]);
      const int expected = pair.from == nullptr ? kPoisonByte : static_cast<int>(pair.from[at]);
      if (got == expected) return;
      atomicAdd(&record->differences, 1ull);
      if (atomicExch(&record->taken, 1u) != 0) return;
      record->pair = p;
      record->got = got;
      record->expected = expected;
      record->call = call;
      record->offset = at;
    };
    for_each_element(
        pair,
        [&](std::int64_t at) {
          const uint4 got = *reinterpret_cast<const uint4*>(pair.to + at);
          const uint4 wanted =
              pair.from == nullptr ? poison() : *reinterpret_cast<const uint4*>(pair.from + at);
          if (got.x == wanted.x && got.y == wanted.y && got.z == wanted.z && got.w == wanted.w) return;
          for (int i = 0; i < 16; ++i) compare_byte(at + i);
        },
        compare_byte);
  }
}

}  // namespace

void ArrayPairs::add(void* to, const void* from, std::int64_t bytes) {
  require(count < kMost, "more than ", kMost, " arrays");
  pair[count++] = {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes};
}

void copy_arrays(const ArrayPairs& pairs, cudaStream_t stream) {
  copy<<<kBlocks, kThreads, 0, stream>>>(pairs);
  require_success(cudaGetLastError(), "launching a copy of arrays");
}

DeviceComparison::DeviceComparison() {
  // CUDA would load the kernels at their first launch, and wait until the device is idle: behind the kernel
  // of a peer on the same device that waits for this rank's next call, until the deadline.
  for (const void* kernel :
       {reinterpret_cast<const void*>(&copy), reinterpret_cast<const void*>(&compare_pairs)}) {
    cudaFuncAttributes attributes{};
    require_success(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  }
  require_success(cudaMalloc(&record_, sizeof(DifferenceRecord)), "cudaMalloc");
  require_success(cudaMemsetAsync(record_, 0, sizeof(DifferenceRecord), cudaStreamPerThread),
                  "cudaMemsetAsync");
  require_success(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
}

DeviceComparison::~DeviceComparison() {
  cudaFree(record_);
}

void DeviceComparison::compare(const ArrayPairs& pairs, std::int64_t call, cudaStream_t stream) {
  compare_pairs<<<kBlocks, kThreads, 0, stream>>>(pairs, call, record_);
  require_success(cudaGetLastError(), "launching a comparison of arrays");
  ++compared_;
}

void DeviceComparison::require_no_difference(cudaStream_t stream,
                                             const std::vector<std::string>& arrays) const {
  DifferenceRecord found{};
  require_success(cudaMemcpyAsync(&found, record_, sizeof found, cudaMemcpyDeviceToHost, stream),
                  "cudaMemcpyAsync");
  require_success(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if (found.differences == 0) return;
  throw Mismatch(str(found.differences, " bytes differ in ", compared_, " comparisons; one is call ",
                     found.call, ", ", arrays.at(static_cast<std::size_t>(found.pair)), ", byte ",
                     found.offset, ": got ", found.got, ", expected ", found.expected));
}

}  // namespace ferry::contract
