// Random values and guarded memory for the tests of formats and kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ferry/types.hpp"
#include "seed.hpp"

namespace ferry::test {

using Random = std::mt19937_64;

inline std::int64_t below(Random& random, std::int64_t bound) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
}

inline constexpr DType kTypes[] = {DType::bf16, DType::fp16, DType::fp32};

// Poisoned memory that begins `offset` bytes after a multiple of 64, with guard bytes on both sides.
class Memory {
 public:
  explicit Memory(std::int64_t bytes, std::int64_t offset = 0);

  std::byte* data() { return block_.data() + start_; }
  const std::byte* data() const { return block_.data() + start_; }
  std::int64_t bytes() const { return bytes_; }
  bool guards_intact() const;
  bool equals(const Memory& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), static_cast<std::size_t>(bytes_)) == 0;
  }

  std::uint32_t bits(DType type, std::int64_t index) const {
    std::uint32_t value = 0;
    std::memcpy(&value, data() + index * bytes_of(type), static_cast<std::size_t>(bytes_of(type)));
    return value;
  }
  void set_bits(DType type, std::int64_t index, std::uint32_t value) {
    std::memcpy(data() + index * bytes_of(type), &value, static_cast<std::size_t>(bytes_of(type)));
  }
  float fp32(std::int64_t index) const {
    float value;
    std::memcpy(&value, data() + index * 4, 4);
    return value;
  }

 private:
  static constexpr std::int64_t kGuard = 192;
  static constexpr std::byte kPoison{0x7F};

  std::vector<std::byte> block_;
  std::int64_t start_;
  std::int64_t bytes_;
};

// Bits of one random value: mostly of magnitude around 1, some zeros, denormals, infinities and NaN.
std::uint32_t random_bits(Random& random, DType type);

// The bits of a random 16-bit value of either sign, at most as large as that of `largest`.
inline std::uint32_t bits_up_to(Random& random, std::uint32_t largest) {
  const auto word = static_cast<std::uint32_t>(random());
  return static_cast<std::uint32_t>((largest & 0x7FFF) * std::uint64_t{word >> 8 & 0xFFFF} >> 16) |
         (word & 0x8000);
}

void fill_random(Random& random, DType type, Memory& row);

// Fills a row of fp32 values: each block of `columns` of any magnitude, its values within 2^-15 of it, and
// some zeros, denormals, infinities and NaN.
void fill_blocks(Random& random, std::int64_t columns, Memory& row);

}  // namespace ferry::test
