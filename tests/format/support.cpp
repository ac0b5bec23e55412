#include "format/support.hpp"

#include <algorithm>

namespace ferry::test {

Memory::Memory(std::int64_t bytes, std::int64_t offset)
    : block_(static_cast<std::size_t>(bytes + 2 * kGuard + 64 + offset), kPoison), bytes_(bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(block_.data()) + kGuard;
  start_ = kGuard + static_cast<std::int64_t>((64 - address % 64) % 64) + offset;
}

bool Memory::guards_intact() const {
  const auto poisoned = [](std::byte byte) { return byte == kPoison; };
  return std::all_of(block_.begin(), block_.begin() + start_, poisoned) &&
         std::all_of(block_.begin() + start_ + bytes_, block_.end(), poisoned);
}

std::uint32_t random_bits(Random& random, DType type) {
  const std::uint64_t word = random();
  const auto raw = static_cast<std::uint32_t>(word >> 32);
  const std::uint32_t bits = type == DType::fp32 ? raw : raw >> 16;
  if (word % 16 == 0) return bits;  // any bits
  const std::uint32_t sign = type == DType::fp32 ? 0x80000000u : 0x8000u;
  const std::uint32_t exponent = type == DType::fp32 ? 0x7F800000u : type == DType::bf16 ? 0x7F80u : 0x7C00u;
  const std::uint32_t unit = exponent & (0u - exponent);   // last bit of the exponent
  if (word % 128 == 1) return bits & (sign | exponent);    // zero, powers of two, infinity
  if (word % 128 == 2) return bits & (sign | (unit - 1));  // denormals
  // An exponent near that of 1.
  const std::uint32_t one = exponent / 2 / unit * unit;
  const std::uint32_t near = one - 6 * unit + static_cast<std::uint32_t>(word >> 8 & 7) * unit;
  return (bits & (sign | (unit - 1))) | near;
}

void fill_random(Random& random, DType type, Memory& row) {
  for (std::int64_t i = 0; i < row.bytes() / bytes_of(type); ++i)
    row.set_bits(type, i, random_bits(random, type));
}

void fill_blocks(Random& random, std::int64_t columns, Memory& row) {
  std::uint32_t largest = 0;  // exponent field of the block
  for (std::int64_t i = 0; i < row.bytes() / 4; ++i) {
    const std::uint64_t word = random();
    const auto raw = static_cast<std::uint32_t>(word >> 32);
    if (i % columns == 0) largest = static_cast<std::uint32_t>(word % 255);
    const std::uint32_t exponent = largest - std::min(largest, static_cast<std::uint32_t>(word >> 8) % 16);
    const std::uint32_t near = (raw & 0x807FFFFF) | exponent << 23;
    row.set_bits(DType::fp32, i, word >> 12 & 0xFF ? near : random_bits(random, DType::fp32));
  }
}

}  // namespace ferry::test
