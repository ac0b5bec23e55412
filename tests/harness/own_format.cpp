#include "harness/own_format.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ferry::contract {

Format own_format() {
  static const Format format = register_format("test_int8", own_encoder(Misbehaviour::none));
  return format;
}

Format own_format_as_raw(int hidden) {
  return Format::raw({hidden, 16});
}

void append_own_row(const std::vector<float>& values, std::array<std::vector<std::byte>, kMaxParts>& parts) {
  float largest = 0;
  for (const float x : values) largest = std::max(largest, std::abs(x));
  const float scale = largest / 127;
  for (const float x : values)
    parts[0].push_back(static_cast<std::byte>(scale == 0 ? 0 : std::lrint(x / scale)));
  std::vector<std::byte> part(16, std::byte{0});
  std::memcpy(part.data(), &scale, sizeof scale);
  parts[1].insert(parts[1].end(), part.begin(), part.end());
}

}  // namespace ferry::contract
