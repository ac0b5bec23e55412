// A format of the tests' own: int8 values with one fp32 scale for each row, and encoders of it that
// misbehave.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "ferry/encoder.hpp"

namespace ferry::contract {

enum class Misbehaviour {
  none,
  writes_past,  // the first byte behind part 0 of row 3
  throws,
  odd_part,  // a part whose size is no multiple of 16
};

// Part 0: int8 [H]; part 1: 16 bytes that begin with the scale.
Encoder own_encoder(Misbehaviour misbehaviour);

// The format "test_int8" of an encoder that does not misbehave, registered at the first call.
Format own_format();
// Its rows as those of a raw format.
Format own_format_as_raw(int hidden);
// Appends the two parts of a row with these values, by the formula of docs/guides/own_format.md.
void append_own_row(const std::vector<float>& values, std::array<std::vector<std::byte>, kMaxParts>& parts);

// The values as they are: rows of bf16 are then those of the format bf16.
Encoder copying_encoder();

}  // namespace ferry::contract
