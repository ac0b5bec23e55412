// The kernel that copies scales from rows to tiles, run on the host: random groups, layouts and numbers of
// blocks, every byte by the formula of docs/formats.md, and counts that no dispatch writes.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "backends/cuda/dispatch/scale_tiles.cuh"
#include "kernels_on_host/grid.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

constexpr std::uint8_t kNoTile = 0xA5;

// 16 bytes apart from what follows, as memory of a device is.
struct alignas(16) Sixteen {
  std::uint8_t bytes[16];
};

class TileRun {
 public:
  TileRun(std::uint64_t seed, Layout layout, std::vector<std::int32_t> counts, std::int32_t words)
      : random_(seed), counts_(std::move(counts)) {
    call_.layout = layout;
    call_.groups = static_cast<std::int32_t>(counts_.size());
    call_.words = words;
    call_.capacity = 0;
    const auto alignment = static_cast<std::int32_t>(1 + random_() % 4);
    for (const std::int32_t count : counts_) {
      offsets_.push_back(static_cast<std::int32_t>(call_.rows));
      call_.rows += (count + alignment - 1) / alignment * alignment;
      call_.capacity = std::max<std::int64_t>(call_.capacity, count + 3);
    }
    if (layout == Layout::expert_padded) {
      for (std::size_t g = 0; g < counts_.size(); ++g)
        offsets_[g] = static_cast<std::int32_t>(static_cast<std::int64_t>(g) * call_.capacity);
      call_.rows = call_.groups * call_.capacity;
    }
    offsets_.push_back(static_cast<std::int32_t>(call_.rows));
    call_.rows += 5;  // beyond the last
    scales_.resize(static_cast<std::size_t>(call_.rows * words) / 4 + 1);
    for (Sixteen& each : scales_) {
      for (std::uint8_t& byte : each.bytes) byte = static_cast<std::uint8_t>(random_());
    }
  }

  // Runs the kernel and returns the tiles.
  std::vector<Sixteen> run() {
    const std::int64_t row_tiles_in_all = row_tiles(call_.rows) + call_.groups;
    std::vector<Sixteen> tiles(static_cast<std::size_t>(row_tiles_in_all * call_.words * kTileBytes / 16));
    std::memset(tiles.data(), kNoTile, tiles.size() * sizeof tiles[0]);
    tile_offsets_.assign(counts_.size() + 1, -1);
    call_.counts = counts_.data();
    call_.row_offsets = offsets_.data();
    call_.scales = reinterpret_cast<const std::byte*>(scales_.data());
    call_.tiles = reinterpret_cast<std::byte*>(tiles.data());
    call_.tile_offsets = tile_offsets_.data();
    on_host::Grid grid(random_());
    const unsigned blocks = 1 + static_cast<unsigned>(random_() % 3);
    auto states = std::make_shared<std::vector<ScaleTileState>>(blocks);
    grid.add(blocks, 64, [&](unsigned block) { write_scale_tiles(call_, &(*states)[block]); });
    grid.run();
    return tiles;
  }

  void expect_formula() {
    const std::vector<Sixteen> tiles = run();
    const auto* got = reinterpret_cast<const std::uint8_t*>(tiles.data());
    std::vector<std::uint8_t> expected(tiles.size() * 16, kNoTile);
    std::int64_t first = 0;
    for (std::size_t g = 0; g < counts_.size(); ++g) {
      EXPECT_EQ(tile_offsets_[g], first);
      std::uint8_t* const group = expected.data() + first * call_.words * 512;
      std::memset(group, 0, static_cast<std::size_t>((counts_[g] + 127) / 128 * call_.words * 512));
      for (std::int64_t r = 0; r < counts_[g]; ++r) {
        const std::uint8_t* row =
            reinterpret_cast<const std::uint8_t*>(scales_.data()) + (offsets_[g] + r) * call_.words * 4;
        for (std::int64_t c = 0; c < 4 * call_.words; ++c) {
          group[512 * ((r / 128) * call_.words + c / 4) + (r % 32) * 16 + ((r % 128) / 32) * 4 + c % 4] =
              row[c];
        }
      }
      first +=
          call_.layout == Layout::expert_padded ? (call_.capacity + 127) / 128 : (counts_[g] + 127) / 128;
    }
    EXPECT_EQ(tile_offsets_.back(), first);
    for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(got[i], expected[i]) << "byte " << i;
  }

  std::vector<std::int32_t>& counts() { return counts_; }
  std::vector<std::int32_t>& offsets() { return offsets_; }
  std::vector<std::int32_t>& tile_offsets() { return tile_offsets_; }
  ScaleTileArguments& call() { return call_; }

 private:
  std::mt19937_64 random_;
  ScaleTileArguments call_{};
  std::vector<std::int32_t> counts_, offsets_, tile_offsets_;
  std::vector<Sixteen> scales_;
};

TEST(ScaleTileKernel, EveryByteByTheFormula) {
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
    std::uint64_t seed = test::seed();
    for (const std::int32_t words : {1, 3, 4, 6, 8}) {
      TileRun(++seed, layout, {0, 1, 127, 0, 128, 129, 1, 0}, words).expect_formula();
      TileRun(++seed, layout, {300}, words).expect_formula();
      TileRun(++seed, layout, {0, 0}, words).expect_formula();
    }
    TileRun(++seed, layout, std::vector<std::int32_t>(70, 2), 1).expect_formula();
    TileRun(++seed, layout, {}, 2).expect_formula();
  }
}

// A plan's rows may be fewer than the exchange has memory for: the caller's memory ends after them.
TEST(ScaleTileKernel, ByAPlanNothingLiesBeyondItsRows) {
  TileRun tiles(test::seed(), Layout::expert_major, {4, 130, 2}, 2);
  PlanHeader header{};
  header.total = tiles.call().rows = tiles.offsets().back();
  tiles.call().by_plan = &header;
  tiles.expect_formula();
  header.total = 1ll << 40;
  tiles.expect_formula();
  header.total = 1;  // all counts are cut
  const std::vector<Sixteen> cut = tiles.run();
  for (std::size_t i = 4 * 2 * 32; i < cut.size(); ++i) ASSERT_EQ(cut[i].bytes[0], kNoTile);
}

// After a call that has failed.
TEST(ScaleTileKernel, NoCountsLeadBeyondTheMemory) {
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
    TileRun tiles(test::seed(), layout, {4, 130, 2}, 2);
    for (const std::int32_t bad : {-1, 1000, 0x7FFFFFFF, static_cast<std::int32_t>(0x80000000)}) {
      tiles.counts() = {bad, bad, bad};
      tiles.run();
      tiles.offsets() = {bad, bad, bad, bad};
      tiles.run();
      const std::int64_t limit = row_tiles(tiles.call().rows) + 3;
      for (const std::int32_t offset : tiles.tile_offsets()) {
        EXPECT_GE(offset, 0);
        EXPECT_LE(offset, limit);
      }
    }
  }
}

}  // namespace
}  // namespace ferry::cuda
