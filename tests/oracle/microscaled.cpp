#include "oracle/microscaled.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "oracle/numbers.hpp"

namespace ferry::oracle {
namespace {

template <class T>
std::vector<std::byte> bytes_of_vector(const std::vector<T>& items) {
  std::vector<std::byte> bytes(items.size() * sizeof(T));
  std::memcpy(bytes.data(), items.data(), bytes.size());
  return bytes;
}

// Two codes of four bits to a byte, the first in the low bits.
std::vector<std::byte> pairs_of(const std::vector<std::uint8_t>& codes) {
  std::vector<std::byte> bytes;
  for (std::size_t c = 0; c < codes.size(); c += 2)
    bytes.push_back(static_cast<std::byte>(codes[c] + 16 * codes[c + 1]));
  return bytes;
}

// A block of an MX format: scale byte and codes. x * 2^-e is exact in double.
struct MxBlock {
  std::uint8_t scale;
  std::vector<std::uint8_t> codes;
};

MxBlock encoded_mx_block(const float* x, std::int64_t count, bool narrow, MxRule rule) {
  double largest = 0;
  for (std::int64_t c = 0; c < count; ++c) {
    if (std::fabs(x[c]) > largest) largest = std::fabs(x[c]);  // false for NaN
  }
  int exponent = std::isinf(largest) ? 127 : -127;
  if (largest > 0 && !std::isinf(largest)) {
    const int k = std::ilogb(largest);
    const double m = std::ldexp(largest, -k), limit = narrow ? 1.5 : 1.75;
    exponent = k - (narrow ? 2 : 8) + (rule == MxRule::up && m > limit ? 1 : 0);
    exponent = std::clamp(exponent, -127, 127);
  }
  MxBlock block{static_cast<std::uint8_t>(exponent + 127), {}};
  for (std::int64_t c = 0; c < count; ++c) {
    const double scaled = std::ldexp(double{x[c]}, -exponent);
    block.codes.push_back(narrow ? e2m1(scaled) : e4m3(scaled));
  }
  return block;
}

// A row of nvfp4: fp32 operations of the contract, each computed in double and rounded, which gives the same.
struct Nvfp4Row {
  std::vector<std::uint8_t> codes, scales;
  float global_scale;
};

float divided(float a, float b) {
  return static_cast<float>(static_cast<double>(a) / static_cast<double>(b));
}

float largest_of(const float* x, std::int64_t count, bool finite) {
  float largest = 0;
  for (std::int64_t c = 0; c < count; ++c) {
    const float magnitude = std::fabs(x[c]);
    if (magnitude > largest && !(finite && std::isinf(magnitude))) largest = magnitude;  // false for NaN
  }
  return largest;
}

// The value of an e4m3 number that is neither negative nor NaN.
double value_of_scale(std::uint8_t bits) {
  return bits < 8 ? std::ldexp(bits, -9) : std::ldexp(8 + bits % 8, bits / 8 - 10);
}

Nvfp4Row encoded_nvfp4_row(const std::vector<float>& row, float given, bool per_token) {
  constexpr std::int64_t kColumns = 16;
  const auto hidden = static_cast<std::int64_t>(row.size());
  Nvfp4Row out;
  out.global_scale =
      per_token ? std::max(divided(largest_of(row.data(), hidden, true), 2688.0f), std::ldexp(1.0f, -126))
                : given;
  const float g = out.global_scale;
  for (std::int64_t begin = 0; begin < hidden; begin += kColumns) {
    const std::int64_t end = std::min(begin + kColumns, hidden);
    std::uint8_t scale = 0x7F;
    float d = 0;
    if (g > 0 && std::isfinite(g)) {
      const std::uint8_t s = e4m3(divided(divided(largest_of(&row[begin], end - begin, false), 6.0f), g));
      const double product = value_of_scale(s) * g;
      if (std::isfinite(static_cast<float>(product))) {
        scale = s;
        d = static_cast<float>(product);
      }
    }
    out.scales.push_back(scale);
    for (std::int64_t c = begin; c < end; ++c)
      out.codes.push_back(d == 0 ? std::uint8_t{0} : e2m1(divided(row[c], d)));
  }
  return out;
}

}  // namespace

std::vector<std::byte> encoded_mx(const std::vector<float>& row, const Format& format, int part) {
  constexpr std::int64_t kMxColumns = 32;
  const auto hidden = static_cast<std::int64_t>(row.size());
  const bool narrow = format.kind == FormatKind::mxfp4;
  std::vector<std::uint8_t> scales, codes;
  for (std::int64_t begin = 0; begin < hidden; begin += kMxColumns) {
    const MxBlock block =
        encoded_mx_block(&row[begin], std::min(kMxColumns, hidden - begin), narrow, format.mx.rule);
    scales.push_back(block.scale);
    codes.insert(codes.end(), block.codes.begin(), block.codes.end());
  }
  if (part == 1) {
    scales.resize((scales.size() + 3) / 4 * 4);
    return bytes_of_vector(scales);
  }
  return narrow ? pairs_of(codes) : bytes_of_vector(codes);
}

std::vector<std::byte> encoded_nvfp4(const std::vector<float>& row, const Format& format, float global_scale,
                                     int part) {
  Nvfp4Row out = encoded_nvfp4_row(row, global_scale, format.nvfp4_options.per_token);
  if (part == 0) return pairs_of(out.codes);
  if (part == 2) return bytes_of_vector(std::vector<float>{out.global_scale});
  out.scales.resize((out.scales.size() + 3) / 4 * 4);
  return bytes_of_vector(out.scales);
}

}  // namespace ferry::oracle
