#include "cuda/fp8/exhaustive.hpp"

#include "backends/cuda/dispatch/routing.cuh"
#include "backends/cuda/dispatch/send_row.cuh"
#include "cuda/fp8/formula.hpp"
#include "harness/require_success.hpp"

namespace ferry::contract {
namespace {

constexpr int kWarps = 4;
constexpr std::uint32_t kInfinity = 0x7F800000u;

__device__ std::uint64_t hash(std::uint64_t value) {
  value = (value + 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ value >> 27) * 0x94D049BB133111EBull;
  return value ^ value >> 31;
}

template <DType kType>
using Bits = std::conditional_t<kType == DType::fp32, std::uint32_t, std::uint16_t>;

// Sources of blocks. A source has rows(), and bits(row, block of the row, column of the block) of kBlocks
// blocks a row.

// Row: a magnitude, and a part of the values that go with it.
template <DType kType, int kBlocks>
struct All16Bit {
  static constexpr std::uint32_t kInfinity = kType == DType::bf16 ? 0x7F80 : 0x7C00;
  static constexpr std::uint32_t kValuesOfBlock = 127;  // beside amax
  static constexpr std::uint32_t kNans = 2 * (0x7FFF - kInfinity);
  static constexpr std::uint32_t kPartsOfAll = (2 * (kInfinity + 1) + kNans) / (kValuesOfBlock * kBlocks) + 1;

  __host__ __device__ std::uint64_t rows() const { return std::uint64_t{kInfinity + 1} * kPartsOfAll; }
  // Small magnitudes go with few values.
  __device__ bool has(std::uint64_t row) const {
    return row % kPartsOfAll * kBlocks * kValuesOfBlock < 2 * (amax(row) + 1) + kNans;
  }
  __device__ std::uint32_t amax(std::uint64_t row) const {
    return static_cast<std::uint32_t>(row / kPartsOfAll);
  }
  __device__ std::uint32_t bits(std::uint64_t row, int block, int column) const {
    const auto part = static_cast<std::uint32_t>(row % kPartsOfAll) * kBlocks + block;
    const std::uint32_t largest = amax(row);
    const auto at = static_cast<int>((largest + part) % 128);
    if (column == at) return largest | (part & 1) << 15;
    const std::uint32_t value = part * kValuesOfBlock + column - (column > at), finite = 2 * (largest + 1);
    if (value < finite) return value / 2 | (value & 1) << 15;
    if (value < finite + kNans) return (kInfinity + 1 + (value - finite) / 2) | (value & 1) << 15;
    return 0;
  }
};

template <int kBlocks>
struct RandomFp32 {
  std::uint64_t seed, row_count;

  __host__ __device__ std::uint64_t rows() const { return row_count; }
  __device__ bool has(std::uint64_t) const { return true; }
  __device__ std::uint32_t bits(std::uint64_t row, int block, int column) const {
    const std::uint64_t of_block = hash(seed ^ (row * kBlocks + block));
    const std::uint64_t random = hash(of_block + column);
    const auto word = static_cast<std::uint32_t>(random);
    if (of_block % 4 == 0) return word;  // any bits, NaN and infinity included
    const auto highest = static_cast<int>(of_block >> 8 & 0xFF) % 255,
               below = static_cast<int>(random >> 32 & 0xFF) % 20;
    return (word & 0x807FFFFFu) | static_cast<std::uint32_t>(max(highest - below, 0)) << 23;
  }
};

template <int kBlocks>
struct BoundariesFp32 {
  static constexpr int kOfExponent = 64, kSpecial = 4;  // amaxes
  static constexpr int kBoundaries = 126, kNeighbours = 5;
  static constexpr int kValues = 2 * kBoundaries * kNeighbours;
  static constexpr int kParts = kValues / (127 * kBlocks) + 1;
  std::uint64_t seed;
  bool power_of_two;

  __host__ __device__ std::uint64_t rows() const { return (255ull * kOfExponent + kSpecial) * kParts; }
  __device__ bool has(std::uint64_t) const { return true; }
  __device__ std::uint32_t amax(std::uint64_t number) const {
    if (number >= 255 * kOfExponent) {
      const auto special = static_cast<std::uint32_t>(number - 255 * kOfExponent);
      return special == 3 ? kInfinity : fp32_bits(1e-4f) - 1 + special;
    }
    const auto exponent = static_cast<std::uint32_t>(number / kOfExponent) << 23;
    const auto of_exponent = static_cast<int>(number % kOfExponent);
    // The ends of the binade, and both sides of 448 times a power of two.
    constexpr std::uint32_t kFractions[] = {0, 1, 0x7FFFFF, 0x5FFFFF, 0x600000, 0x600001};
    return exponent | (of_exponent < 6 ? kFractions[of_exponent]
                                       : static_cast<std::uint32_t>(hash(seed ^ number)) & 0x7FFFFF);
  }
  __device__ std::uint32_t bits(std::uint64_t row, int block, int column) const {
    const std::uint32_t largest = amax(row / kParts);
    const int part = static_cast<int>(row % kParts) * kBlocks + block;
    const int at = (static_cast<int>(row) + part) % 128;
    const int value = part * 127 + column - (column > at);
    if (column == at || value >= kValues) return largest | (part & 1u) << 31;
    const int boundary = value / (2 * kNeighbours), neighbour = value % kNeighbours - kNeighbours / 2;
    const double middle = (value_of_e4m3(boundary) + value_of_e4m3(boundary + 1)) / 2;
    const auto exact =
        fp32_bits(static_cast<float>(middle / Fp8Formula::of(fp32_of(largest), power_of_two).factor));
    const std::int64_t bits = max(static_cast<std::int64_t>(exact) + neighbour, std::int64_t{0});
    return min(static_cast<std::uint32_t>(bits), largest) | (value / kNeighbours & 1u) << 31;
  }
};

template <DType kType, int kDeep>
struct WarpMemory {
  alignas(16) Bits<kType> row[kDeep * 256];
  alignas(16) std::uint8_t values[kDeep * 256];
  alignas(16) std::uint32_t scales[kDeep * 2];
};

__device__ void report(Fp8Comparison* all, std::uint32_t amax, std::uint32_t input, std::uint32_t got,
                       std::uint32_t expected) {
  atomicAdd(&all->mismatches, 1ull);
  if (atomicExch(&all->taken, 1u) != 0) return;
  all->amax = amax;
  all->input = input;
  all->got = got;
  all->expected = expected;
}

// Each warp quantises rows as a sending warp does, and compares them.
template <DType kType, int kDeep, class Blocks>
__global__ void __launch_bounds__(32 * kWarps)
    compare(Blocks source, Fp8Options options, Encoding encoding, Fp8Comparison* all) {
  __shared__ WarpMemory<kType, kDeep> memories[kWarps];
  constexpr int kColumns = kDeep * 256;
  const int thread = threadIdx.x % 32;
  WarpMemory<kType, kDeep>& memory = memories[threadIdx.x / 32];
  unsigned long long compared = 0;
  for (std::uint64_t row = std::uint64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < source.rows();
       row += std::uint64_t{gridDim.x} * kWarps) {
    if (!source.has(row)) continue;
    for (int column = thread; column < kColumns; column += 32) {
      memory.row[column] = static_cast<Bits<kType>>(source.bits(row, column / 128, column % 128));
      memory.values[column] = 0xA5;
    }
    __syncwarp();
    cuda::send_encoded<kType, kDeep>(
        reinterpret_cast<const std::byte*>(memory.row), reinterpret_cast<std::byte*>(memory.values), 1u,
        {0, kColumns}, encoding, [&](bool stores, std::int64_t offset, std::uint32_t word) {
          if (stores)
            *reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::byte*>(memory.scales) + offset) = word;
        });
    __syncwarp();
    for (int block = 0; block < 2 * kDeep; ++block) {
      float input[4];
      std::uint32_t magnitude = 0;
      for (int i = 0; i < 4; ++i) {
        input[i] = cuda::value_of<kType>(memory.row[128 * block + 32 * i + thread], 0);
        const std::uint32_t bits = fp32_bits(input[i]) & 0x7FFFFFFFu;
        if (bits <= kInfinity) magnitude = max(magnitude, bits);
      }
      magnitude = __reduce_max_sync(~0u, magnitude);
      const Fp8Formula formula = Fp8Formula::of(fp32_of(magnitude), options.power_of_two);
      for (int i = 0; i < 4; ++i) {
        const std::uint8_t got = memory.values[128 * block + 32 * i + thread],
                           expected = formula.quantise(input[i]);
        if (got != expected) report(all, magnitude, fp32_bits(input[i]), got, expected);
      }
      compared += 4;
      const std::uint32_t got =
          options.packed ? memory.scales[block / 4] >> 8 * (block % 4) & 0xFF : memory.scales[block];
      const std::uint32_t expected = options.packed ? formula.biased_exponent() : fp32_bits(formula.scale);
      if (thread == 0 && got != expected) report(all, magnitude, magnitude, got, expected);
    }
    __syncwarp();
  }
  atomicAdd(&all->values, compared);
}

template <DType kType, int kDeep, class Blocks>
Fp8Comparison run(const Blocks& source, const Fp8Options& options) {
  using device::require_success;
  Fp8Comparison* on_device = nullptr;
  require_success(cudaMalloc(&on_device, sizeof(Fp8Comparison)), "cudaMalloc");
  require_success(cudaMemset(on_device, 0, sizeof(Fp8Comparison)), "cudaMemset");
  constexpr int kBlocks = 132 * 16;
  compare<kType, kDeep>
      <<<kBlocks, 32 * kWarps>>>(source, options, encoding_of(Format::fp8_e4m3(options)), on_device);
  require_success(cudaGetLastError(), "launching the comparison");
  Fp8Comparison result;
  require_success(cudaMemcpy(&result, on_device, sizeof result, cudaMemcpyDeviceToHost), "cudaMemcpy");
  require_success(cudaFree(on_device), "cudaFree");
  return result;
}

template <DType kType, int kDeep>
Fp8Comparison run_16_bit(const Fp8Options& options) {
  return run<kType, kDeep>(All16Bit<kType, 2 * kDeep>{}, options);
}

}  // namespace

Fp8Comparison compare_16_bit(DType type, const Fp8Options& options, bool whole_rows) {
  if (type == DType::bf16)
    return whole_rows ? run_16_bit<DType::bf16, 14>(options) : run_16_bit<DType::bf16, 8>(options);
  return whole_rows ? run_16_bit<DType::fp16, 14>(options) : run_16_bit<DType::fp16, 8>(options);
}

Fp8Comparison compare_random_fp32(std::uint64_t seed, std::int64_t values, const Fp8Options& options) {
  const auto rows = static_cast<std::uint64_t>((values + 8 * 256 - 1) / (8 * 256));
  return run<DType::fp32, 8>(RandomFp32<16>{seed, rows}, options);
}

Fp8Comparison compare_boundaries_fp32(std::uint64_t seed, const Fp8Options& options) {
  return run<DType::fp32, 8>(BoundariesFp32<16>{seed, options.power_of_two}, options);
}

}  // namespace ferry::contract
