#include "backends/cpu/expert_scale.hpp"

#include <cstdint>

#include "format/numbers.hpp"

namespace ferry::cpu {

bool ExpertScaleEncoder::encode(const EncodedRow& to, const void* in, DType type, std::int64_t columns,
                                const Encoding& encoding, float scale) {
  if (encoding.is_two_level()) return kernels_.encode_row(to, in, type, columns, encoding, scale);
  quotients_.resize(static_cast<std::size_t>(columns));
  kernels_.convert_row(quotients_.data(), DType::fp32, in, type, columns, Store::cached);
  for (float& x : quotients_) x = x / scale;
  if (encoding.is_mx())
    return kernels_.encode_row(to, quotients_.data(), DType::fp32, columns, encoding, 1.0f);
  auto* const values = static_cast<std::uint8_t*>(to.values);
  for (std::int64_t c = 0; c < columns; ++c)
    values[c] = fp32_to_e4m3(quotients_[static_cast<std::size_t>(c)]);
  return true;
}

}  // namespace ferry::cpu
