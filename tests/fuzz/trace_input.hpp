// The format of one fuzzer input, which holds up to three NPY files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace trace_fuzz {

// Byte 0: experts, 0 for "derive from the ids". Bytes 1 to 4: the sizes of the ids and of the weights, 16
// bits each, little endian. Then the ids, the weights, and the sequence lengths in the remaining bytes. An
// empty file counts as absent.
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

// A size beyond the end takes the bytes up to the end. `bytes` holds at least kPrefix bytes.
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
