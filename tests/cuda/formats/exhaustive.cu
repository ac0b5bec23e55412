#include "cuda/formats/exhaustive.hpp"

#include "backends/cuda/dispatch/routing.cuh"
#include "backends/cuda/dispatch/send_row.cuh"
#include "cuda/formats/formula.hpp"
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

// How a row is encoded. An encoding has kBlock, kColumns of a row, the most kScaleBytes of a block,
// formula(amax), encode(), for a warp, and the scale that it has stored for a block.
struct ScaleWriter {
  std::uint8_t* scales;
  __device__ void operator()(bool stores, std::int64_t offset, std::uint32_t word) const {
    if (stores) *reinterpret_cast<std::uint32_t*>(scales + offset) = word;
  }
};

template <DType kType, int kDeep>
struct Fp8 {
  static constexpr int kBlock = 128, kColumns = 256 * kDeep, kScaleBytes = 4;
  static constexpr bool kNarrow = false;
  Encoding encoding;

  __device__ Fp8Formula formula(float amax) const {
    return Fp8Formula::of(amax, encoding.rule == ScaleRule::power_of_two, encoding.packs_scales());
  }
  __device__ void encode(const std::byte* row, std::byte* values, std::uint8_t* scales) const {
    cuda::send_encoded<kType, kDeep>(row, {values, 1u}, {0, kColumns}, encoding, ScaleWriter{scales});
  }
  __device__ std::uint32_t scale(const std::uint8_t* scales, int block) const {
    return encoding.packs_scales() ? scales[block] : reinterpret_cast<const std::uint32_t*>(scales)[block];
  }
};

// Formats with a byte for each scale.
struct ByteScales {
  static constexpr int kScaleBytes = 1;
  __device__ static std::uint32_t scale(const std::uint8_t* scales, int block) { return scales[block]; }
};

template <DType kType, int kDeep, ElementType kElement>
struct Mx : ByteScales {
  static constexpr int kBlock = 32, kColumns = 256 * kDeep;
  static constexpr bool kNarrow = kElement == ElementType::e2m1;
  Encoding encoding;

  __device__ MxFormula formula(float amax) const {
    return MxFormula::of(amax, kNarrow, encoding.rule == ScaleRule::mx_up);
  }
  __device__ void encode(const std::byte* row, std::byte* values, std::uint8_t* scales) const {
    cuda::send_mx<kType, kDeep, kElement>(row, {values, 1u}, {0, kColumns}, encoding, ScaleWriter{scales});
  }
};

template <DType kType, int kAtOnce>
struct Nvfp4 : ByteScales {
  static constexpr int kBlock = 16, kColumns = 2048;
  static constexpr bool kNarrow = true;
  float g;

  __device__ Nvfp4Formula formula(float amax) const { return Nvfp4Formula::of(amax, g); }
  __device__ void encode(const std::byte* row, std::byte* values, std::uint8_t* scales) const {
    cuda::send_nvfp4<kType, kAtOnce>(row, {values, 1u}, {0, kColumns}, g, ScaleWriter{scales});
  }
};

// Sources of blocks: rows(), and bits(block, column), where row r has the blocks [r * blocks of a row, ...).

// A magnitude, and a part of the values that go with it.
template <DType kType, int kBlock>
struct All16Bit {
  static constexpr std::uint32_t kInfinity = kType == DType::bf16 ? 0x7F80 : 0x7C00, kBeside = kBlock - 1,
                                 kNans = 2 * (0x7FFF - kInfinity);
  static constexpr std::uint32_t kParts = (2 * (kInfinity + 1) + kNans) / kBeside + 1;

  __host__ __device__ std::uint64_t blocks() const { return std::uint64_t{kInfinity + 1} * kParts; }
  // Small magnitudes go with few values.
  __device__ bool has(std::uint64_t block) const {
    return block < blocks() &&
           block % kParts * kBeside < 2 * (static_cast<std::uint32_t>(block / kParts) + 1) + kNans;
  }
  __device__ std::uint32_t bits(std::uint64_t block, int column) const {
    const auto largest = static_cast<std::uint32_t>(block / kParts),
               part = static_cast<std::uint32_t>(block % kParts);
    const auto at = static_cast<int>((largest + part) % kBlock);
    if (column == at) return largest | (part & 1) << 15;
    const std::uint32_t value = part * kBeside + column - (column > at), finite = 2 * (largest + 1);
    if (value < finite) return value / 2 | (value & 1) << 15;
    if (value < finite + kNans) return (kInfinity + 1 + (value - finite) / 2) | (value & 1) << 15;
    return 0;
  }
};

struct RandomFp32 {
  std::uint64_t seed, count;

  __host__ __device__ std::uint64_t blocks() const { return count; }
  __device__ bool has(std::uint64_t block) const { return block < count; }
  __device__ std::uint32_t bits(std::uint64_t block, int column) const {
    const std::uint64_t of_block = hash(seed ^ block), random = hash(of_block + column);
    const auto word = static_cast<std::uint32_t>(random);
    if (of_block % 4 == 0) return word;  // any bits, NaN and infinity included
    const auto highest = static_cast<int>(of_block >> 8 & 0xFF) % 255,
               below = static_cast<int>(random >> 32 & 0xFF) % 20;
    return (word & 0x807FFFFFu) | static_cast<std::uint32_t>(max(highest - below, 0)) << 23;
  }
};

template <class Encoding>
struct BoundariesFp32 {
  static constexpr int kOfExponent = 64, kSpecial = 4;  // amaxes
  static constexpr int kBoundaries = Encoding::kNarrow ? 7 : 126, kNeighbours = 5;
  static constexpr int kValues = 2 * kBoundaries * kNeighbours, kBeside = Encoding::kBlock - 1;
  static constexpr int kParts = kValues / kBeside + 1;
  std::uint64_t seed;
  Encoding encoding;

  __host__ __device__ std::uint64_t blocks() const { return (255ull * kOfExponent + kSpecial) * kParts; }
  __device__ bool has(std::uint64_t block) const { return block < blocks(); }
  __device__ std::uint32_t amax(std::uint64_t number) const {
    if (number >= 255 * kOfExponent) {  // at the limit of fp8's formula, and infinity
      const auto special = static_cast<std::uint32_t>(number - 255 * kOfExponent);
      return special == 3 ? kInfinity : fp32_bits(1e-4f) - 1 + special;
    }
    // The ends of the binade, and both sides of the largest element of each type.
    constexpr std::uint32_t kFractions[] = {0,        1,        0x7FFFFF, 0x3FFFFF, 0x400000,
                                            0x400001, 0x5FFFFF, 0x600000, 0x600001};
    const auto of_exponent = static_cast<int>(number % kOfExponent);
    return static_cast<std::uint32_t>(number / kOfExponent) << 23 |
           (of_exponent < 9 ? kFractions[of_exponent]
                            : static_cast<std::uint32_t>(hash(seed ^ number)) & 0x7FFFFF);
  }
  __device__ static double value_of(int code) {
    if (!Encoding::kNarrow) return value_of_e4m3(code);
    return code < 2 ? code * 0.5 : (2 + code % 2) * two_to_the(code / 2 - 2);
  }
  __device__ static double unit(const Fp8Formula& formula) { return 1.0 / formula.factor; }
  __device__ static double unit(const MxFormula& formula) { return two_to_the(formula.exponent); }
  __device__ static double unit(const Nvfp4Formula& formula) { return formula.divisor; }
  __device__ std::uint32_t bits(std::uint64_t block, int column) const {
    const std::uint32_t largest = amax(block / kParts);
    const auto part = static_cast<int>(block % kParts);
    const int at = static_cast<int>(block) % Encoding::kBlock,
              value = part * kBeside + column - (column > at);
    if (column == at || value >= kValues) return largest | (part & 1u) << 31;
    const int boundary = value / (2 * kNeighbours), neighbour = value % kNeighbours - kNeighbours / 2;
    const double middle = (value_of(boundary) + value_of(boundary + 1)) / 2;
    const auto exact = fp32_bits(static_cast<float>(middle * unit(encoding.formula(fp32_of(largest)))));
    const std::int64_t bits = max(static_cast<std::int64_t>(exact) + neighbour, std::int64_t{0});
    return min(static_cast<std::uint32_t>(bits), largest) | (value / kNeighbours & 1u) << 31;
  }
};

template <DType kType, class Encoding>
struct WarpMemory {
  alignas(16) Bits<kType> row[Encoding::kColumns];
  alignas(16) std::uint8_t values[Encoding::kColumns / (Encoding::kNarrow ? 2 : 1)];
  alignas(16) std::uint8_t scales[Encoding::kColumns / Encoding::kBlock * Encoding::kScaleBytes];
};

__device__ void report(FormatComparison* all, std::uint32_t amax, std::uint32_t input, std::uint32_t got,
                       std::uint32_t expected) {
  atomicAdd(&all->mismatches, 1ull);
  if (atomicExch(&all->taken, 1u) != 0) return;
  all->amax = amax;
  all->input = input;
  all->got = got;
  all->expected = expected;
}

// Each warp encodes rows as a sending warp does, and compares them.
template <DType kType, class Encoding, class Blocks>
__global__ void __launch_bounds__(32 * kWarps)
    compare(Blocks source, Encoding encoding, FormatComparison* all) {
  __shared__ WarpMemory<kType, Encoding> memories[kWarps];
  constexpr int kBlock = Encoding::kBlock, kColumns = Encoding::kColumns, kBlocks = kColumns / kBlock;
  const int thread = threadIdx.x % 32;
  WarpMemory<kType, Encoding>& memory = memories[threadIdx.x / 32];
  unsigned long long compared = 0;
  const std::uint64_t rows = (source.blocks() + kBlocks - 1) / kBlocks;
  for (std::uint64_t row = std::uint64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows;
       row += std::uint64_t{gridDim.x} * kWarps) {
    const std::uint64_t first = row * kBlocks;
    for (int column = thread; column < kColumns; column += 32) {
      const std::uint64_t block = first + column / kBlock;
      memory.row[column] =
          source.has(block) ? static_cast<Bits<kType>>(source.bits(block, column % kBlock)) : Bits<kType>{0};
    }
    for (std::size_t at = thread; at < sizeof memory.values; at += 32) memory.values[at] = 0xA5;
    __syncwarp();
    encoding.encode(reinterpret_cast<const std::byte*>(memory.row),
                    reinterpret_cast<std::byte*>(memory.values), memory.scales);
    __syncwarp();
    constexpr int kEach = kBlock < 32 ? 1 : kBlock / 32,
                  kChunk = 32 * kEach;  // columns of a thread, and of the warp
    for (int chunk = thread; chunk < kColumns; chunk += kChunk) {
      float input[kEach];
      std::uint32_t magnitude = 0;
      for (int i = 0; i < kEach; ++i) {
        input[i] = cuda::value_of<kType>(memory.row[chunk + 32 * i], 0);
        const std::uint32_t bits = fp32_bits(input[i]) & 0x7FFFFFFFu;
        if (bits <= kInfinity) magnitude = max(magnitude, bits);
      }
      for (int step = min(kBlock, 32) / 2; step > 0; step /= 2)
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, step));
      const auto formula = encoding.formula(fp32_of(magnitude));
      for (int i = 0; i < kEach; ++i) {
        const int column = chunk + 32 * i;
        const std::uint8_t got = Encoding::kNarrow ? memory.values[column / 2] >> (4 * (column % 2)) & 15
                                                   : memory.values[column],
                           expected = formula.code(input[i]);
        if (got != expected) report(all, magnitude, fp32_bits(input[i]), got, expected);
      }
      const std::uint32_t scale = encoding.scale(memory.scales, chunk / kBlock);
      if (chunk % kBlock == 0 && scale != formula.stored())
        report(all, magnitude, magnitude, scale, formula.stored());
      compared += source.has(first + chunk / kBlock) ? kEach : 0;
    }
    __syncwarp();
  }
  atomicAdd(&all->values, compared);
}

template <DType kType, class Encoding, class Blocks>
FormatComparison run(const Blocks& source, const Encoding& encoding) {
  using device::require_success;
  FormatComparison* on_device = nullptr;
  require_success(cudaMalloc(&on_device, sizeof(FormatComparison)), "cudaMalloc");
  require_success(cudaMemset(on_device, 0, sizeof(FormatComparison)), "cudaMemset");
  constexpr int kBlocks = 132 * 16;
  compare<kType><<<kBlocks, 32 * kWarps>>>(source, encoding, on_device);
  require_success(cudaGetLastError(), "launching the comparison");
  FormatComparison result;
  require_success(cudaMemcpy(&result, on_device, sizeof result, cudaMemcpyDeviceToHost), "cudaMemcpy");
  require_success(cudaFree(on_device), "cudaFree");
  return result;
}

// Calls run_as(encoding) with the code that `format` and `way` choose.
template <DType kType, class RunAs>
FormatComparison with_encoding(const Format& format, RowWay way, float g, RunAs run_as) {
  const Encoding encoding = encoding_of(format);
  if (encoding.is_two_level())
    return way == RowWay::streamed ? run_as(Nvfp4<kType, 2>{{}, g})
                                   : run_as(Nvfp4 < kType, kType == DType::fp32 ? 1 : 4 > {{}, g});
  const auto deep = [&]<int kDeep>() {
    if (!encoding.is_mx()) return run_as(Fp8<kType, kDeep>{encoding});
    if (encoding.element == ElementType::e4m3)
      return run_as(Mx<kType, kDeep, ElementType::e4m3>{{}, encoding});
    return run_as(Mx<kType, kDeep, ElementType::e2m1>{{}, encoding});
  };
  if constexpr (kType != DType::fp32) {
    if (way == RowWay::streamed) return deep.template operator()<14>();
  }
  return deep.template operator()<8>();
}

template <DType kType>
FormatComparison compare_all(const Format& format, RowWay way, float g) {
  return with_encoding<kType>(format, way, g, [](const auto& encoding) {
    constexpr int kBlock = std::remove_cvref_t<decltype(encoding)>::kBlock;
    return run<kType>(All16Bit<kType, kBlock>{}, encoding);
  });
}

}  // namespace

FormatComparison compare_16_bit(DType type, const Format& format, RowWay way, float g) {
  return type == DType::bf16 ? compare_all<DType::bf16>(format, way, g)
                             : compare_all<DType::fp16>(format, way, g);
}

FormatComparison compare_random(std::uint64_t seed, std::int64_t values, const Format& format, float g) {
  return with_encoding<DType::fp32>(format, RowWay::plain, g, [&](const auto& encoding) {
    constexpr int kBlock = std::remove_cvref_t<decltype(encoding)>::kBlock;
    const auto blocks = static_cast<std::uint64_t>((values + kBlock - 1) / kBlock);
    return run<DType::fp32>(RandomFp32{seed, blocks}, encoding);
  });
}

FormatComparison compare_boundaries(std::uint64_t seed, const Format& format, float g) {
  return with_encoding<DType::fp32>(format, RowWay::plain, g, [&](const auto& encoding) {
    using Encoding = std::remove_cvref_t<decltype(encoding)>;
    return run<DType::fp32>(BoundariesFp32<Encoding>{seed, encoding}, encoding);
  });
}

}  // namespace ferry::contract
