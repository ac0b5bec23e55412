// What a kernel of dispatch does to rows.
#pragma once

#include "format/encoding.hpp"

namespace ferry::cuda {

// Moves rows, or quantises them to fp8, to an MX format or to NVFP4. `microscaled`: to one of the latter two,
// in kernels that serve both.
enum class Quantisation { none, fp8, mx, nvfp4, microscaled };

constexpr Quantisation quantisation_of(const Encoding& encoding) {
  if (encoding.is_two_level()) return Quantisation::nvfp4;
  if (encoding.is_mx()) return Quantisation::mx;
  return encoding.quantises() ? Quantisation::fp8 : Quantisation::none;
}

}  // namespace ferry::cuda
