// The parts of formats and the tiles of their scales.
#include "format/parts.hpp"

#include <gtest/gtest.h>

#include <set>

#include "format/support.hpp"
#include "refusal.hpp"

namespace ferry::test {
namespace {

// ---- The parts of each format, their addresses, and the formats that are refused.

void expect_rows(const PartLayout& part, std::int64_t row_bytes, std::int64_t wire_bytes) {
  EXPECT_FALSE(part.columns);
  EXPECT_EQ(part.row_bytes, row_bytes);
  EXPECT_EQ(part.wire_bytes, wire_bytes);
  EXPECT_EQ(elements_of(part), 1);
}

void expect_columns(const PartLayout& part, std::int64_t elements, std::int64_t wire_bytes) {
  EXPECT_TRUE(part.columns);
  EXPECT_EQ(part.element_bytes, 4);
  EXPECT_EQ(part.row_bytes, 4 * elements);
  EXPECT_EQ(part.wire_bytes, wire_bytes);
  EXPECT_EQ(elements_of(part), elements);
}

TEST(Parts, OfUnquantisedFormats) {
  EXPECT_EQ(parts_of(Format::bf16(), 7168).count, 1);
  expect_rows(parts_of(Format::bf16(), 7168).part[0], 14336, 14336);
  expect_rows(parts_of(Format::fp16(), 1000).part[0], 2000, 2000);
  expect_rows(parts_of(Format::fp32(), 1000).part[0], 4000, 4000);
}

TEST(Parts, OfFp8) {
  const PartList rows = parts_of(Format::fp8_e4m3(), 7424);  // 58 blocks
  EXPECT_EQ(rows.count, 2);
  expect_rows(rows.part[0], 7424, 7424);
  expect_rows(rows.part[1], 232, 240);
  expect_columns(parts_of(Format::fp8_e4m3({.column_major = true}), 7424).part[1], 58, 240);
  // A short last block has a scale too. 58 exponents take 15 words of four; two bytes are unused.
  expect_rows(parts_of(Format::fp8_e4m3(), 144).part[1], 8, 16);
  const Fp8Options packed{.power_of_two = true, .packed = true};
  expect_rows(parts_of(Format::fp8_e4m3(packed), 7424).part[1], 60, 64);
  const Fp8Options packed_columns{.column_major = true, .power_of_two = true, .packed = true};
  expect_columns(parts_of(Format::fp8_e4m3(packed_columns), 7424).part[1], 15, 64);
}

TEST(Parts, OfMxFormats) {
  const PartList mxfp8 = parts_of(Format::mxfp8(), 7168);  // 224 blocks
  EXPECT_EQ(mxfp8.count, 2);
  expect_rows(mxfp8.part[0], 7168, 7168);
  expect_rows(mxfp8.part[1], 224, 224);
  const PartList mxfp4 = parts_of(Format::mxfp4(), 2880);  // 90 blocks: two bytes are unused
  expect_rows(mxfp4.part[0], 1440, 1440);
  expect_rows(mxfp4.part[1], 92, 96);
  expect_rows(parts_of(Format::mxfp8(), 1008).part[1], 32, 32);  // a short last block has a scale too
  expect_columns(parts_of(Format::mxfp4({.column_major = true}), 2880).part[1], 23, 96);
}

TEST(Parts, OfNvfp4) {
  const PartList parts = parts_of(Format::nvfp4(), 2880);  // 180 blocks
  EXPECT_EQ(parts.count, 2);
  expect_rows(parts.part[0], 1440, 1440);
  expect_rows(parts.part[1], 180, 192);
  const PartList per_token = parts_of(Format::nvfp4({.per_token = true, .column_major = true}), 2880);
  ASSERT_EQ(per_token.count, 3);
  expect_columns(per_token.part[1], 45, 192);
  expect_rows(per_token.part[2], 4, 16);
}

TEST(Parts, OfRawFormats) {
  const PartList parts = parts_of(Format::raw({1024, 64, 16, 48}), 0);
  ASSERT_EQ(parts.count, 4);
  expect_rows(parts.part[0], 1024, 1024);
  expect_rows(parts.part[1], 64, 64);
  expect_rows(parts.part[2], 16, 16);
  expect_rows(parts.part[3], 48, 48);
  EXPECT_EQ(wire_bytes(parts), 1152);
}

TEST(Parts, ColumnsStartAtMultiplesOfFourElements) {
  const PartLayout columns = parts_of(Format::fp8_e4m3({.column_major = true}), 256).part[1];
  EXPECT_EQ(leading_dimension(columns, {0, 3}), 0);
  EXPECT_EQ(leading_dimension(columns, {1, 3}), 4);
  EXPECT_EQ(leading_dimension(columns, {4, 3}), 4);
  EXPECT_EQ(leading_dimension(columns, {5, 3}), 8);
  EXPECT_EQ(part_bytes_total(columns, {5, 3}), 2 * 8 * 4);
  EXPECT_EQ(element_offset(columns, 3, 1, 8), (8 + 3) * 4);
  const PartLayout rows = parts_of(Format::fp8_e4m3(), 256).part[1];
  EXPECT_EQ(leading_dimension(rows, {5, 3}), 0);
  EXPECT_EQ(part_bytes_total(rows, {5, 3}), 5 * 8);
  EXPECT_EQ(element_offset(rows, 3, 0, 0), 24);
}

TEST(Parts, EachGroupOfPaddedRowsHasColumnsOfItsOwn) {
  const PartLayout columns = parts_of(Format::fp8_e4m3({.column_major = true}), 256).part[1];  // two
  const RowRoom room{.rows = 15, .groups = 3, .group_rows = 5};
  EXPECT_EQ(leading_dimension(columns, room), 8);
  EXPECT_EQ(aligned_rows(room), 3 * 8);
  EXPECT_EQ(part_bytes_total(columns, room), 3 * 2 * 8 * 4);
  EXPECT_EQ(column_row(columns, 4, 5, 8), 4);
  EXPECT_EQ(column_row(columns, 5, 5, 8), 2 * 8);
  EXPECT_EQ(column_row(columns, 14, 5, 8), 2 * 2 * 8 + 4);
  EXPECT_EQ(column_row(columns, 14, 0, 16), 14);
  EXPECT_EQ(column_row(columns, 14, 15, 16), 14);
  const PartLayout rows = parts_of(Format::fp8_e4m3(), 256).part[1];
  EXPECT_EQ(column_row(rows, 14, 5, 0), 14);
  EXPECT_EQ(part_bytes_total(rows, room), 15 * 8);
  EXPECT_EQ(aligned_rows({.rows = 0, .groups = 0, .group_rows = 5}), 0);
}

// A message has the scales of tiles as it has those of rows.
TEST(Parts, OfScalesAsTiles) {
  const PartLayout tiles = parts_of(Format::nvfp4({.tiles = true}), 2880).part[1];  // 180 blocks
  EXPECT_TRUE(tiles.tiles);
  EXPECT_EQ(tiles.wire_bytes, parts_of(Format::nvfp4(), 2880).part[1].wire_bytes);
  EXPECT_EQ(elements_of(tiles), 45);
  EXPECT_EQ(row_tile_bytes(tiles), 45 * 512);
  EXPECT_EQ(received_row_bytes(tiles), 45 * 512);
  EXPECT_EQ(part_bytes_total(tiles, {129, 3}), (2 + 3) * 45 * 512);
  EXPECT_EQ(element_offset(tiles, 0, 1, 0), 512);
  EXPECT_EQ(element_offset(tiles, 33, 0, 0), 16 + 4);
  EXPECT_EQ(element_offset(tiles, 128 + 127, 44, 0), (45 + 44) * 512 + 31 * 16 + 3 * 4);
}

const Format kFormats[] = {Format::bf16(),
                           Format::fp32(),
                           Format::fp8_e4m3(),
                           Format::fp8_e4m3({.column_major = true}),
                           Format::fp8_e4m3({.power_of_two = true, .packed = true}),
                           Format::fp8_e4m3({.column_major = true, .power_of_two = true, .packed = true}),
                           Format::mxfp8({.tiles = true}),
                           Format::raw({96, 16, 32})};

// Rows of groups that follow one another, and of groups that have columns of their own.
const RowRoom kRooms[] = {{.rows = 7, .groups = 1}, {.rows = 21, .groups = 3, .group_rows = 7}};

// Every byte of a row is inside the memory, and no two bytes of rows share an address.
void expect_rows_apart(const Format& format, const RowRoom& room) {
  const PartList parts = parts_of(format, 1040);
  for (int p = 0; p < parts.count; ++p) {
    const PartLayout& part = parts.part[p];
    const std::int64_t leading = leading_dimension(part, room);
    std::set<std::int64_t> taken;
    for (std::int64_t row = 0; row < room.rows; ++row) {
      const std::int64_t stored = column_row(part, row, room.group_rows, leading);
      for (std::int64_t e = 0; e < elements_of(part); ++e) {
        const std::int64_t start = element_offset(part, stored, e, leading);
        for (std::int64_t b = start; b < start + part.element_bytes; ++b) {
          ASSERT_TRUE(b >= 0 && b < part_bytes_total(part, room)) << to_string(format) << " part " << p;
          ASSERT_TRUE(taken.insert(b).second) << to_string(format) << " part " << p << " byte " << b;
        }
      }
    }
    ASSERT_EQ(static_cast<std::int64_t>(taken.size()), room.rows * part.row_bytes);
  }
}

TEST(Parts, RowsDoNotOverlap) {
  for (const Format& format : kFormats) {
    for (const RowRoom& room : kRooms) expect_rows_apart(format, room);
  }
}

TEST(Parts, StoreAndZeroWriteTheirRowOnly) {
  Random random(seed());
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(seed()));
  for (const Format& format : kFormats) {
    const PartList parts = parts_of(format, 1040);
    for (int p = 0; p < parts.count; ++p) {
      const PartLayout& part = parts.part[p];
      const RowRoom& room = kRooms[below(random, 2)];
      const std::int64_t leading = leading_dimension(part, room),
                         row = column_row(part, below(random, room.rows), room.group_rows, leading);
      Memory wire(part.wire_bytes), memory(part_bytes_total(part, room)), expected(memory.bytes());
      for (std::int64_t i = 0; i < wire.bytes(); ++i) wire.data()[i] = static_cast<std::byte>(random());

      store_part_row(part, memory.data(), row, leading, wire.data());
      for (std::int64_t b = 0; b < part.row_bytes; ++b) {
        const std::int64_t at =
            element_offset(part, row, b / part.element_bytes, leading) + b % part.element_bytes;
        expected.data()[at] = wire.data()[b];
      }
      ASSERT_TRUE(memory.equals(expected) && memory.guards_intact()) << to_string(format) << " part " << p;

      zero_part_row(part, memory.data(), row, leading);
      for (std::int64_t b = 0; b < part.row_bytes; ++b) {
        const std::int64_t at =
            element_offset(part, row, b / part.element_bytes, leading) + b % part.element_bytes;
        expected.data()[at] = std::byte{0};
      }
      ASSERT_TRUE(memory.equals(expected) && memory.guards_intact()) << to_string(format) << " part " << p;
    }
  }
}

std::string refusal(const Format& format, std::int64_t hidden, DType input) {
  return test::refusal([&] { check_format(format, hidden, input); });
}

Format raw_unchecked(std::int64_t a, std::int64_t b, std::int64_t c = 0) {
  return {.kind = FormatKind::raw, .part_bytes = {a, b, c}};
}

TEST(CheckFormat, AcceptsValidFormats) {
  for (const std::int64_t hidden : {64, 1000, 2688, 2880, 5120, 7168, 7424, 8}) {
    EXPECT_EQ(refusal(Format::bf16(), hidden, DType::bf16), "accepted");
    EXPECT_EQ(refusal(Format::fp16(), hidden, DType::fp16), "accepted");
    EXPECT_EQ(refusal(Format::fp32(), hidden, DType::fp32), "accepted");
  }
  EXPECT_EQ(refusal(Format::fp32(), 4, DType::fp32), "accepted");
  for (const DType type : kTypes) EXPECT_EQ(refusal(Format::fp8_e4m3(), 16, type), "accepted");
  EXPECT_EQ(refusal(Format::fp8_e4m3({.power_of_two = true, .packed = true}), 2880, DType::bf16), "accepted");
  EXPECT_EQ(refusal(raw_unchecked(16, 0), -1, DType::bf16), "accepted");
  EXPECT_EQ(refusal(raw_unchecked(kMaxPartBytes, 48, 16), 0, DType::bf16), "accepted");
}

TEST(CheckFormat, RefusesWithTheNumbers) {
  EXPECT_EQ(refusal(Format::bf16(), 1001, DType::bf16),
            "format bf16: a row of 1001 bf16 values is 2002 bytes before encoding, must be a multiple of 16: "
            "make hidden a multiple of 8");
  EXPECT_EQ(refusal(Format::fp32(), 6, DType::fp32),
            "format fp32: a row of 6 fp32 values is 24 bytes before encoding, must be a multiple of 16: make "
            "hidden a multiple of 4");
  EXPECT_EQ(refusal(Format::fp8_e4m3(), 1000, DType::bf16),
            "format fp8: a row of 1000 e4m3 values is 1000 bytes after encoding, must be a multiple of 16: "
            "make hidden a multiple of 16");
  EXPECT_EQ(refusal(Format::bf16(), 0, DType::bf16), "format bf16: hidden = 0, must be positive");
  EXPECT_EQ(refusal(Format::fp8_e4m3(), -16, DType::bf16), "format fp8: hidden = -16, must be positive");
  EXPECT_EQ(
      refusal(Format::fp16(), 64, DType::bf16),
      "format fp16 takes fp16 tokens, but the tokens are bf16: convert the tokens to fp16, or choose the "
      "format bf16");
  EXPECT_EQ(refusal(Format::fp8_e4m3({.packed = true}), 64, DType::bf16),
            "format fp8-packed: packed scales must be powers of two: set power_of_two too");
  EXPECT_EQ(refusal({.kind = static_cast<FormatKind>(9)}, 64, DType::bf16),
            "format: kind 9 is unknown, must be 0 to 8");
}

TEST(CheckFormat, RefusesRawSizes) {
  const std::string limits = " bytes, must be a multiple of 16 from 16 to 1073741824";
  EXPECT_EQ(refusal(raw_unchecked(0, 0), 64, DType::bf16), "format raw: part 0 is 0" + limits);
  EXPECT_EQ(refusal(raw_unchecked(1024, 8), 64, DType::bf16), "format raw: part 1 is 8" + limits);
  EXPECT_EQ(refusal(raw_unchecked(-16, 0), 64, DType::bf16), "format raw: part 0 is -16" + limits);
  EXPECT_EQ(refusal(raw_unchecked(kMaxPartBytes + 16, 0), 64, DType::bf16),
            "format raw: part 0 is 1073741840" + limits);
  EXPECT_EQ(refusal(raw_unchecked(16, 0, 16), 64, DType::bf16),
            "format raw: part 2 follows a part of 0 bytes: leave no gaps");
}

// ---- Tiles of scales against the layout that cuBLAS documents for the scales of block-scaled matrix
// products: "1D Block Scaling Factors Layout", https://docs.nvidia.com/cuda/cublas/index.html. There a matrix
// of scales [outer, inner] has, at (outer, inner), the byte
//
//   tile   (sf_inner + sf_outer * sf_inner_dim) * 128   with sf_outer, sf_inner the first scale of the tile
//   within (outer % 32) * 16 + (outer / 32) * 4 + inner of the tile
//
// where sf_inner_dim is the number of scales of a row rounded up to 4. This file is written from that formula
// alone; the oracle (tests/oracle/scale_tiles.hpp) has its own.

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
