// How one input of the trace fuzzer holds up to three files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace trace_fuzz {

// First byte: experts, 0 to find out. Then the sizes of ids and weights, two bytes each, lowest first. Then
// ids, weights and, from what is left, sequence lengths; an empty file is an absent one.
inline constexpr std::size_t kPrefix = 5;

inline std::string pack(int experts, const std::string& ids, const std::string& weights,
                        const std::string& lengths) {
  std::string input(1, static_cast<char>(experts));
  for (const std::size_t size : {ids.size(), weights.size()}) {
    input += static_cast<char>(size & 0xff);
    input += static_cast<char>(size >> 8 & 0xff);
  }
  return input + ids + weights + lengths;
}

struct Input {
  int experts = 0;
  std::span<const std::byte> ids, weights, lengths;
};

// A size that says more than there is takes what there is. `bytes` holds at least kPrefix.
inline Input unpack(std::span<const std::byte> bytes) {
  const auto number = [&](std::size_t at) {
    return std::to_integer<std::size_t>(bytes[at]) | std::to_integer<std::size_t>(bytes[at + 1]) << 8;
  };
  std::span<const std::byte> rest = bytes.subspan(kPrefix);
  const auto take = [&](std::size_t size) {
    const auto part = rest.first(size < rest.size() ? size : rest.size());
    rest = rest.subspan(part.size());
    return part;
  };
  const auto ids = take(number(1));
  const auto weights = take(number(3));
  return {std::to_integer<int>(bytes[0]), ids, weights, rest};
}

}  // namespace trace_fuzz
