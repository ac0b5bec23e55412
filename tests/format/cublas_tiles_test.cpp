// Tiles of scales against the layout that cuBLAS documents for the scales of block-scaled matrix products:
// "1D Block Scaling Factors Layout", https://docs.nvidia.com/cuda/cublas/index.html. There a matrix of scales
// [outer, inner] has, at (outer, inner), the byte
//
//   tile   (sf_inner + sf_outer * sf_inner_dim) * 128   with sf_outer, sf_inner the first scale of the tile
//   within (outer % 32) * 16 + (outer / 32) * 4 + inner of the tile
//
// where sf_inner_dim is the number of scales of a row rounded up to 4. This file is written from that formula
// alone; the oracle (tests/oracle/scale_tiles.hpp) has its own.
#include <gtest/gtest.h>

#include "format/parts.hpp"

namespace ferry::test {
namespace {

std::int64_t cublas_offset(std::int64_t outer, std::int64_t inner, std::int64_t scales_of_row) {
  const std::int64_t sf_inner_dim = (scales_of_row + 3) / 4 * 4;
  const std::int64_t sf_outer = outer / 128, sf_inner = inner / 4 * 4;
  const std::int64_t tile = (sf_inner + sf_outer * sf_inner_dim) * 128;
  const std::int64_t outer_of_tile = outer % 128, inner_of_tile = inner % 4;
  return tile + outer_of_tile % 32 * 16 + outer_of_tile / 32 * 4 + inner_of_tile;
}

TEST(ScaleTiles, LieWhereCublasReadsThem) {
  for (const Format& format :
       {Format::mxfp8({.tiles = true}), Format::mxfp4({.tiles = true}), Format::nvfp4({.tiles = true})}) {
    const std::int64_t block = format.kind == FormatKind::nvfp4 ? 16 : 32;
    for (const std::int64_t hidden : {64, 96, 608, 2880, 7168}) {
      const PartLayout part = parts_of(format, hidden).part[1];
      const std::int64_t scales = (hidden + block - 1) / block;
      for (std::int64_t row = 0; row < 300; ++row) {
        for (std::int64_t scale = 0; scale < scales; ++scale) {
          ASSERT_EQ(element_offset(part, row, scale / 4, 0) + scale % 4, cublas_offset(row, scale, scales))
              << to_string(format) << " H = " << hidden << " row " << row << " scale " << scale;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry::test
