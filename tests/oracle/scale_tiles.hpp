// Scales in tiles of 128 rows x 4 blocks (512 bytes), as block-scaled matrix units read them: written from
// the inverse of the address, byte by byte. Includes nothing of src/.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ferry::oracle {

inline constexpr std::int64_t kTileRows = 128, kTileBlocks = 4, kTileBytes = kTileRows * kTileBlocks;

// The scale that a byte holds: the row in its group, and the block of the row. Either may lie past the end,
// where the byte is padding.
struct TiledScale {
  std::int64_t row, block;
};

// The scale at byte `offset` of a group's tiles. `blocks`: of a row.
inline TiledScale tiled_scale(std::int64_t offset, std::int64_t blocks) {
  const std::int64_t tile = offset / kTileBytes, byte = offset % kTileBytes;
  const std::int64_t tiles_wide = (blocks + kTileBlocks - 1) / kTileBlocks;
  // 32 lines of 16 bytes: line l holds rows l, l + 32, l + 64 and l + 96, four blocks of each.
  const std::int64_t line = byte / 16, quarter = byte % 16 / 4;
  return {tile / tiles_wide * kTileRows + quarter * 32 + line, tile % tiles_wide * kTileBlocks + byte % 4};
}

// Rows of tiles that a group of `rows` rows fills.
inline std::int64_t row_tiles(std::int64_t rows) {
  return (rows + kTileRows - 1) / kTileRows;
}

// Bytes of a group of `rows` rows.
inline std::int64_t tiled_bytes(std::int64_t rows, std::int64_t blocks) {
  return row_tiles(rows) * ((blocks + kTileBlocks - 1) / kTileBlocks) * kTileBytes;
}

// Writes the tiles of one group to `memory`. `rows`: the scales of each row, of `blocks` bytes.
inline void write_tiled(const std::vector<std::vector<std::uint8_t>>& rows, std::int64_t blocks,
                        std::uint8_t* memory) {
  const auto count = static_cast<std::int64_t>(rows.size());
  for (std::int64_t offset = 0, end = tiled_bytes(count, blocks); offset < end; ++offset) {
    const TiledScale at = tiled_scale(offset, blocks);
    const bool padding = at.row >= count || at.block >= blocks;
    memory[offset] = padding ? 0 : rows[static_cast<std::size_t>(at.row)][static_cast<std::size_t>(at.block)];
  }
}

// First row tile of each group in packed tiles, then their total.
inline std::vector<std::int64_t> tile_offsets(const std::vector<std::int64_t>& counts) {
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t count : counts) offsets.push_back(offsets.back() + row_tiles(count));
  return offsets;
}

}  // namespace ferry::oracle
