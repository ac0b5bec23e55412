// Loads, stores and rounds values of the number types. Computes in double, which represents every finite
// value of each type exactly.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ferry/types.hpp"

namespace ferry::oracle {

// The value stored at `from`, exactly.
float load(DType type, const std::byte* from);

// Rounds to nearest, ties to even; values beyond the largest finite one become infinity; NaN becomes the
// canonical NaN of the type (7FFF, 7FFFFFFF).
void store(DType type, float value, std::byte* to);

// The value after a store as `type` and a load.
float rounded(DType type, float value);

// Rounds to e4m3: to nearest, ties to even; saturates at 448; NaN becomes 7F.
std::uint8_t e4m3(double value);

// Converts `count` values. If the types are equal, copies the bytes, NaN included.
void convert(DType from_type, const std::byte* from, DType to_type, std::byte* to, std::int64_t count);

}  // namespace ferry::oracle
