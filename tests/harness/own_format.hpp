// A format of the tests' own: int8 values with one fp32 scale for each row, and encoders of it that
// misbehave.
#pragma once

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

// The values as they are: rows of bf16 are then those of the format bf16.
Encoder copying_encoder();

}  // namespace ferry::contract
