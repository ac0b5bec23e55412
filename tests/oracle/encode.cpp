#include "oracle/encode.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "oracle/block_formats.hpp"
#include "oracle/numbers.hpp"

namespace ferry::oracle {
namespace {

constexpr std::int64_t kBlock = 128;  // columns with one scale

std::int64_t blocks_of(std::int64_t hidden) {
  return (hidden + kBlock - 1) / kBlock;
}

struct Quantised {
  std::vector<std::uint8_t> values;
  std::vector<float> scales;
};

// 2^ceil(log2(quotient)): the smallest power of two that is >= quotient.
float power_of_two_at_least(float quotient) {
  if (std::isinf(quotient)) return quotient;
  int exponent = 0;
  const double significand = std::frexp(double{quotient}, &exponent);  // in [0.5, 1)
  return static_cast<float>(std::ldexp(1.0, significand == 0.5 ? exponent - 1 : exponent));
}

Quantised quantised(const std::vector<float>& row, const Fp8Options& options) {
  Quantised out;
  const auto hidden = static_cast<std::int64_t>(row.size());
  for (std::int64_t begin = 0; begin < hidden; begin += kBlock) {
    const std::int64_t end = std::min(begin + kBlock, hidden);
    float largest = 0;
    for (std::int64_t c = begin; c < end; ++c) {
      if (std::fabs(row[c]) > largest) largest = std::fabs(row[c]);  // false for NaN
    }
    const float s = std::max(largest, 1e-4f);
    const float scale = options.power_of_two ? power_of_two_at_least(s / 448.0f) : s / 448.0f;
    const float inverse = options.power_of_two ? 1.0f / scale : 448.0f / s;
    out.scales.push_back(scale);
    for (std::int64_t c = begin; c < end; ++c) out.values.push_back(e4m3(row[c] * inverse));
  }
  return out;
}

std::vector<float> values_of(const GlobalInputs& inputs, int rank, std::int64_t token) {
  const std::int64_t hidden = inputs.config.hidden, size = bytes_of(inputs.type);
  const std::byte* row = inputs.ranks[rank].parts[0].data() + token * hidden * size;
  std::vector<float> values(hidden);
  for (std::int64_t c = 0; c < hidden; ++c) values[c] = load(inputs.type, row + c * size);
  return values;
}

template <class T>
std::vector<std::byte> bytes_of_vector(const std::vector<T>& items) {
  std::vector<std::byte> bytes(items.size() * sizeof(T));
  std::memcpy(bytes.data(), items.data(), bytes.size());
  return bytes;
}

// The eight exponent bits of a power of two, block b in byte b % 4 of word b / 4.
std::vector<std::byte> packed_exponents(const std::vector<float>& scales) {
  std::vector<std::byte> bytes((scales.size() + 3) / 4 * 4);
  for (std::size_t b = 0; b < scales.size(); ++b) {
    const int biased = std::isinf(scales[b]) ? 255 : std::ilogb(scales[b]) + 127;
    bytes[b] = static_cast<std::byte>(biased);  // words are little-endian
  }
  return bytes;
}

// x / scale in double, then rounded to fp32: a quotient of two fp32 that is rounded to double first, which
// has more than twice as many bits, has the bits of one rounding.
std::vector<float> divided(std::vector<float> values, float scale) {
  for (float& x : values) x = static_cast<float>(double{x} / double{scale});
  return values;
}

PartShape dense(std::int64_t row_bytes) {
  return {.elements = 1, .element_bytes = row_bytes, .row_step = row_bytes, .element_step = row_bytes};
}

// Rows that received memory has room for; see part_shapes().
struct Room {
  std::int64_t rows, group_rows;
};

// Scales of `elements` words a row.
PartShape scale_shape(std::int64_t elements, bool column_major, const Room& room) {
  if (!column_major) return dense(elements * 4);
  const std::int64_t of_column = room.group_rows > 0 ? room.group_rows : room.rows;
  const std::int64_t leading = (of_column + 3) / 4 * 4;
  return {.elements = elements,
          .element_bytes = 4,
          .row_step = 4,
          .element_step = leading * 4,
          .leading_dimension = leading,
          .group_rows = room.group_rows};
}

// Scales in bytes, one for each `block` columns.
PartShape byte_scale_shape(std::int64_t hidden, std::int64_t block, bool column_major, bool tiles,
                           const Room& room) {
  const std::int64_t words = (hidden + 4 * block - 1) / (4 * block);
  if (!tiles) return scale_shape(words, column_major, room);
  return {.elements = words, .element_bytes = 4, .tile_blocks = (hidden + block - 1) / block};
}

}  // namespace

std::vector<PartShape> part_shapes(const Format& format, std::int64_t hidden, std::int64_t rows,
                                   std::int64_t group_rows) {
  const Room room{rows, group_rows};
  switch (format.kind) {
    case FormatKind::bf16:
    case FormatKind::fp16:
      return {dense(hidden * 2)};
    case FormatKind::fp32:
      return {dense(hidden * 4)};
    case FormatKind::fp8_e4m3:
      return {dense(hidden), scale_shape(format.fp8.packed ? (blocks_of(hidden) + 3) / 4 : blocks_of(hidden),
                                         format.fp8.column_major, room)};
    case FormatKind::mxfp8:
    case FormatKind::mxfp4:
      return {dense(format.kind == FormatKind::mxfp8 ? hidden : hidden / 2),
              byte_scale_shape(hidden, 32, format.mx.column_major, format.mx.tiles, room)};
    case FormatKind::nvfp4: {
      const Nvfp4Options& options = format.nvfp4_options;
      std::vector<PartShape> shapes{dense(hidden / 2),
                                    byte_scale_shape(hidden, 16, options.column_major, options.tiles, room)};
      if (options.per_token) shapes.push_back(dense(4));
      return shapes;
    }
    case FormatKind::raw:
    case FormatKind::registered:
      break;
  }
  std::vector<PartShape> shapes;
  for (const std::int64_t bytes : format.part_bytes) {
    if (bytes > 0) shapes.push_back(dense(bytes));
  }
  return shapes;
}

std::vector<std::int64_t> input_row_bytes(const Format& format, DType type, std::int64_t hidden) {
  if (format.kind != FormatKind::raw) return {hidden * bytes_of(type)};
  std::vector<std::int64_t> bytes;
  for (const PartShape& shape : part_shapes(format, hidden, 0, 0)) bytes.push_back(shape.row_step);
  return bytes;
}

std::vector<std::vector<std::byte>> encoded_row(const std::vector<float>& values, const Format& format,
                                                float g) {
  if (format.kind == FormatKind::fp8_e4m3) {
    const Quantised row = quantised(values, format.fp8);
    return {bytes_of_vector(row.values),
            format.fp8.packed ? packed_exponents(row.scales) : bytes_of_vector(row.scales)};
  }
  // A scale byte for each block.
  const bool nvfp4 = format.kind == FormatKind::nvfp4;
  BlockRow row = nvfp4 ? encode_nvfp4(values, format.nvfp4_options.per_token ? nvfp4_row_scale(values) : g)
                       : encode_mx(values, format.kind == FormatKind::mxfp4 ? Element::e2m1 : Element::e4m3,
                                   format.mx.rule);
  row.scales.resize((row.scales.size() + 3) / 4 * 4);
  return {bytes_of_vector(row.values), bytes_of_vector(row.scales),
          bytes_of_vector(std::vector<float>{row.row_scale})};
}

std::vector<std::byte> encoded_part(const GlobalInputs& inputs, int rank, std::int64_t token, int part,
                                    const float* weight, const float* input_scale) {
  const FormatKind kind = inputs.format.kind;
  if (kind == FormatKind::fp8_e4m3 || kind == FormatKind::mxfp8 || kind == FormatKind::mxfp4 ||
      kind == FormatKind::nvfp4) {
    std::vector<float> values = values_of(inputs, rank, token);
    if (input_scale == nullptr) return encoded_row(values, inputs.format, inputs.global_scale)[part];
    if (kind == FormatKind::nvfp4) return encoded_row(values, inputs.format, *input_scale)[part];
    values = divided(values, *input_scale);
    if (kind == FormatKind::mxfp8) return encoded_row(values, inputs.format, 1)[part];
    std::vector<std::uint8_t> codes;
    for (const float x : values) codes.push_back(e4m3(x));
    return bytes_of_vector(codes);
  }
  const std::int64_t bytes = input_row_bytes(inputs.format, inputs.type, inputs.config.hidden)[part];
  const std::byte* row = inputs.ranks[rank].parts[part].data() + token * bytes;
  if (weight == nullptr) return {row, row + bytes};
  std::vector<std::byte> weighted(bytes);
  const std::int64_t size = bytes_of(inputs.type);
  for (std::int64_t c = 0; c < inputs.config.hidden; ++c) {
    store(inputs.type, *weight * load(inputs.type, row + c * size), weighted.data() + c * size);
  }
  return weighted;
}

}  // namespace ferry::oracle
