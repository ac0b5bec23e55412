// Number types, by way of double: every finite value of every type here is a double.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ferry/types.hpp"

namespace ferry::oracle {

// The value stored at `from`, exactly.
float load(DType type, const std::byte* from);

// Rounds to nearest, ties to even, past the largest finite value to infinity; NaN becomes the one canonical
// NaN of the type (7FFF, 7FFFFFFF).
void store(DType type, float value, std::byte* to);

// What is left of a value after being stored as `type`.
float rounded(DType type, float value);

// e4m3: to nearest, ties to even, past the largest finite value (448) to it; NaN becomes 7F.
std::uint8_t e4m3(float value);

// Copies `count` values from one type to another. Equal types: the bytes move unchanged, whatever they are.
void convert(DType from_type, const std::byte* from, DType to_type, std::byte* to, std::int64_t count);

}  // namespace ferry::oracle
