// A layer without weights as a program in two micro-batches.
#pragma once

#include "ferry/program.hpp"

namespace ferry::test {

inline Program program_in_two_batches() {
  return overlap(parse_program(R"(
    program moe
    input x: tokens
    input ids: ids
    rows = dispatch(x, ids)
    out: outputs = call experts(rows)
    y = combine(out, rows)
    output y
  )"),
                 2);
}

}  // namespace ferry::test
