// What a kernel of dispatch does to rows.
#pragma once

#include "format/encoding.hpp"

namespace ferry::cuda {

// Moves rows, quantises them to fp8, or to a microscaled format.
enum class Quantisation { none, fp8, microscaled };

constexpr Quantisation quantisation_of(const Encoding& encoding) {
  if (encoding.is_microscaled()) return Quantisation::microscaled;
  return encoding.quantises() ? Quantisation::fp8 : Quantisation::none;
}

}  // namespace ferry::cuda
