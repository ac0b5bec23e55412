// Encodes a received row with the scale of its expert (DispatchOptions::input_scales).
#pragma once

#include <vector>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/encoding.hpp"

namespace ferry::cpu {

class ExpertScaleEncoder {
 public:
  explicit ExpertScaleEncoder(const Kernels& kernels) : kernels_(kernels) {}

  // Two levels: g = scale. mxfp8: the block rule on in / scale. fp8: e4m3(in / scale), and no scales. Returns
  // whether every scale of a block could be formed, as Kernels::encode_row.
  bool encode(const EncodedRow& to, const void* in, DType type, std::int64_t columns,
              const Encoding& encoding, float scale);

 private:
  const Kernels& kernels_;
  std::vector<float> quotients_;  // of one row
};

}  // namespace ferry::cpu
