// Rows of the formats whose blocks are short and whose scales are bytes: mxfp8, mxfp4 and nvfp4.
#pragma once

#include <cstddef>
#include <vector>

#include "ferry/format.hpp"

namespace ferry::oracle {

// Part `part` of a row: values, then scales, then (nvfp4 per token) the row's scale.
std::vector<std::byte> encoded_mx(const std::vector<float>& row, const Format& format, int part);
std::vector<std::byte> encoded_nvfp4(const std::vector<float>& row, const Format& format, float global_scale,
                                     int part);

}  // namespace ferry::oracle
