// Builds the kernel table of the instruction set that the including file is compiled for.
#pragma once

#include "backends/cpu/kernels/encode.hpp"
#include "backends/cpu/kernels/kernels.hpp"
#include "backends/cpu/kernels/rows.hpp"
#include "backends/cpu/kernels/sum.hpp"

namespace ferry::cpu {
namespace {

constexpr Kernels table(const char* name) {
  return {.name = name,
          .copy = copy,
          .copy_to_many = copy_to_many,
          .zero = zero,
          .weighted_sum = weighted_sum,
          .convert_row = convert_row,
          .apply_weight = apply_weight,
          .dot = dot,
          .encode_row = encode_row};
}

}  // namespace
}  // namespace ferry::cpu
