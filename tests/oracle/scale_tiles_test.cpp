// Tiles of scales against the address formula and addresses worked out by hand.
#include "oracle/scale_tiles.hpp"

#include <gtest/gtest.h>

namespace ferry::oracle {
namespace {

// Byte of the scale of row r and block c: the published formula, the other way round than the oracle has it.
std::int64_t address(std::int64_t r, std::int64_t c, std::int64_t blocks) {
  return 512 * (r / 128 * ((blocks + 3) / 4) + c / 4) + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

TEST(OracleTiles, AddressesByHand) {
  const auto expect = [](std::int64_t offset, std::int64_t blocks, std::int64_t row, std::int64_t block) {
    const TiledScale at = tiled_scale(offset, blocks);
    EXPECT_EQ(at.row, row) << offset;
    EXPECT_EQ(at.block, block) << offset;
  };
  expect(0, 8, 0, 0);
  expect(3, 8, 0, 3);
  expect(4, 8, 32, 0);
  expect(16, 8, 1, 0);
  expect(511, 8, 127, 3);
  expect(512, 8, 0, 4);
  expect(1024, 8, 128, 0);
  expect(1024, 9, 0, 8);
  EXPECT_EQ(tiled_bytes(0, 8), 0);
  EXPECT_EQ(tiled_bytes(1, 1), 512);
  EXPECT_EQ(tiled_bytes(129, 5), 2048);
  EXPECT_EQ(tile_offsets({0, 1, 127, 128, 129, 0, 1}), (std::vector<std::int64_t>{0, 0, 1, 2, 3, 5, 5, 6}));
}

// Every byte of tiles of these groups: one scale at its address, 0 elsewhere.
TEST(OracleTiles, EveryByteByTheFormula) {
  for (const std::int64_t rows : {0, 1, 31, 32, 33, 127, 128, 129, 300}) {
    for (const std::int64_t blocks : {1, 3, 4, 5, 8, 14}) {
      std::vector<std::vector<std::uint8_t>> scales(static_cast<std::size_t>(rows));
      std::vector<std::uint8_t> expected(static_cast<std::size_t>(tiled_bytes(rows, blocks)));
      std::uint8_t next = 0;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < blocks; ++c) {
          next = static_cast<std::uint8_t>(next % 251 + 1);
          scales[static_cast<std::size_t>(r)].push_back(next);
          expected.at(static_cast<std::size_t>(address(r, c, blocks))) = next;
        }
      }
      std::vector<std::uint8_t> tiles(expected.size(), 0xA5);
      write_tiled(scales, blocks, tiles.data());
      EXPECT_EQ(tiles, expected) << rows << " x " << blocks;
    }
  }
}

}  // namespace
}  // namespace ferry::oracle
