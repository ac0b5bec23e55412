#include <stdexcept>

#include "ferry/cuda/encoder.cuh"
#include "harness/own_format.hpp"

namespace ferry::contract {
namespace {

struct EncodeInt8 {
  bool writes_past;

  __host__ __device__ void operator()(const cuda::RowToEncode& row) const {
    float mine = 0;
    for (int c = row.thread; c < row.hidden; c += row.threads) mine = fmaxf(mine, fabsf(row.value(c)));
    const float scale = row.largest(mine) / 127;
    auto* const values = reinterpret_cast<std::int8_t*>(row.parts[0]);
    for (int c = row.thread; c < row.hidden; c += row.threads)
      values[c] = scale == 0 ? std::int8_t{0} : static_cast<std::int8_t>(rintf(row.value(c) / scale));
    auto* const words = reinterpret_cast<float*>(row.parts[1]);
    for (int w = row.thread; w < 4; w += row.threads) words[w] = w == 0 ? scale : 0;
    if (writes_past && row.index == 3 && row.thread == 0) values[row.hidden] = 1;
  }
};

struct Copy {
  __host__ __device__ void operator()(const cuda::RowToEncode& row) const {
    const auto* const from = static_cast<const std::uint16_t*>(row.values);
    auto* const to = reinterpret_cast<std::uint16_t*>(row.parts[0]);
    for (int c = row.thread; c < row.hidden; c += row.threads) to[c] = from[c];
  }
};

}  // namespace

Encoder copying_encoder() {
  return cuda::make_encoder(
      [](int hidden) { return std::array<std::int64_t, kMaxParts>{2 * std::int64_t{hidden}}; }, Copy{});
}

Encoder own_encoder(Misbehaviour misbehaviour) {
  const auto part_bytes = [misbehaviour](int hidden) {
    return std::array<std::int64_t, kMaxParts>{hidden, misbehaviour == Misbehaviour::odd_part ? 20 : 16};
  };
  Encoder encoder = cuda::make_encoder(part_bytes, EncodeInt8{misbehaviour == Misbehaviour::writes_past});
  if (misbehaviour == Misbehaviour::throws) {
    encoder.on_host =
        encoder.on_device = [](const EncoderCall&) { throw std::runtime_error("no row today"); };
  }
  return encoder;
}

}  // namespace ferry::contract
