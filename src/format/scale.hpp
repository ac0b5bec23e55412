// The scale of a block of quantised values.
#pragma once

#include <cstdint>

#include "format/fp32.hpp"

namespace ferry {

struct BlockScale {
  float scale;   // what is stored: value = scale * q
  float factor;  // what values are multiplied by before they are rounded to the element type
};

// A power of two from 2^-127 to 2^127, or infinity, as its biased exponent.
FERRY_HD constexpr std::uint8_t biased_exponent(float scale) {
  return static_cast<std::uint8_t>(bits_of(scale) >> 23);
}

// The power of two with a biased exponent below 255; infinity for 255.
FERRY_HD constexpr float scale_of_exponent(std::uint32_t biased) {
  return biased == 0 ? float_of(0x00400000u) : float_of(biased << 23);
}

}  // namespace ferry
