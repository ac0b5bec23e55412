// What the fp8 rows of docs/from-router-to-grouped-gemm.md stand in.
#include <ferry/ferry.hpp>

float e4m3_to_float(std::uint8_t bits);

void layer(ferry::Exchange& exchange, const ferry::Tokens& tokens, const ferry::Ids& ids,
           const float* weights, int kHidden, float* x) {
  // BLOCK
}
