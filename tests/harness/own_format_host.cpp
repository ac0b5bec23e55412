#include <cmath>
#include <cstring>
#include <stdexcept>

#include "format/numbers.hpp"
#include "harness/own_format.hpp"

namespace ferry::contract {
namespace {

float value_at(const EncoderCall& call, std::int64_t row, int column) {
  const auto* const at = static_cast<const std::byte*>(call.tokens) + row * call.stride;
  if (call.type == DType::fp32) return reinterpret_cast<const float*>(at)[column];
  const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(at)[column];
  return call.type == DType::fp16 ? fp16_value(bits) : bf16_value(bits);
}

void encode(const EncoderCall& call, std::int64_t row) {
  float largest = 0;
  for (int c = 0; c < call.hidden; ++c) largest = std::fmax(largest, std::fabs(value_at(call, row, c)));
  const float scale = largest / 127;
  auto* const values = static_cast<std::int8_t*>(call.parts[0]) + row * call.part_strides[0];
  for (int c = 0; c < call.hidden; ++c)
    values[c] =
        scale == 0 ? std::int8_t{0} : static_cast<std::int8_t>(std::rint(value_at(call, row, c) / scale));
  const float words[4] = {scale, 0, 0, 0};
  std::memcpy(static_cast<std::byte*>(call.parts[1]) + row * call.part_strides[1], words, sizeof words);
}

}  // namespace

Encoder copying_encoder() {
  Encoder encoder;
  encoder.part_bytes = [](int hidden) {
    return std::array<std::int64_t, kMaxParts>{2 * std::int64_t{hidden}};
  };
  encoder.on_host = [](const EncoderCall& call) {
    for (std::int64_t row = 0; row < call.rows; ++row)
      std::memcpy(static_cast<std::byte*>(call.parts[0]) + row * call.part_strides[0],
                  static_cast<const std::byte*>(call.tokens) + row * call.stride,
                  static_cast<std::size_t>(2 * call.hidden));
  };
  return encoder;
}

Encoder own_encoder(Misbehaviour misbehaviour) {
  Encoder encoder;
  encoder.part_bytes = [misbehaviour](int hidden) {
    return std::array<std::int64_t, kMaxParts>{hidden, misbehaviour == Misbehaviour::odd_part ? 20 : 16};
  };
  encoder.on_host = [misbehaviour](const EncoderCall& call) {
    if (misbehaviour == Misbehaviour::throws) throw std::runtime_error("no row today");
    for (std::int64_t row = 0; row < call.rows; ++row) {
      encode(call, row);
      if (misbehaviour == Misbehaviour::writes_past && row == 3)
        static_cast<std::int8_t*>(call.parts[0])[row * call.part_strides[0] + call.hidden] = 1;
    }
  };
  return encoder;
}

}  // namespace ferry::contract
