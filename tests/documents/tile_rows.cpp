// The frame of a block in docs/from-router-to-grouped-gemm.md.
#include <cstddef>
#include <cstdint>
#include <ferry/ferry.hpp>

void multiply_groups(ferry::Exchange& exchange, const ferry::Tokens& tokens, const ferry::Ids& ids,
                     const float* weights,
                     void (*gemm)(int group, const std::byte* values, const std::byte* scales,
                                  std::int32_t rows)) {
  // BLOCK
}
