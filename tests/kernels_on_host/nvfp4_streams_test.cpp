// Rows with a scale of their own that a warp's stream brings in one piece or in two, one row after the other:
// the scale follows from the whole row before its first value is encoded.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "backends/cuda/dispatch/routing.cuh"
#include "backends/cuda/dispatch/send_row.cuh"
#include "kernels_on_host/grid.hpp"
#include "oracle/block_formats.hpp"
#include "oracle/numbers.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

constexpr int kRows = 5;

struct RowAfterRow {
  const std::byte* next;
  int left, bytes;

  bool open(const std::byte** row, ByteRange* range) {
    if (left == 0) return false;
    *row = next;
    *range = {0, bytes};
    next += bytes;
    --left;
    return true;
  }
};

void expect_rows(DType type, int hidden, std::mt19937_64& random) {
  SCOPED_TRACE(testing::Message() << to_string(type) << ", H = " << hidden);
  const int bytes = 2 * hidden;
  std::vector<uint4> rows(static_cast<std::size_t>(kRows) * static_cast<std::size_t>(bytes) / 16);
  std::vector<std::vector<float>> numbers(kRows);
  for (int row = 0; row < kRows; ++row) {
    // The largest value lies in another place of each row, the last in its last column. A row has infinities.
    const int largest = row * (hidden - 1) / (kRows - 1);
    for (int c = 0; c < hidden; ++c) {
      float value = std::ldexp(static_cast<float>(static_cast<int>(random() % 2001) - 1000), -12);
      if (c == largest) value = -40.0f * static_cast<float>(row + 1);
      if (row == 2 && random() % 64 == 0) value = INFINITY;
      auto* const at = reinterpret_cast<std::byte*>(rows.data()) + row * bytes + 2 * c;
      oracle::store(type, value, at);
      numbers[static_cast<std::size_t>(row)].push_back(oracle::load(type, at));
    }
  }
  const Format format = Format::nvfp4({.per_token = true});
  LaneState state{};
  DispatchArguments call{};
  call.lane.hidden = hidden;
  call.lane.state = &state;
  call.type = type;
  call.encoding = encoding_of(format);
  call.parts = parts_of(format, hidden);
  call.message = device_message_layout(call.parts);
  const auto message_bytes = static_cast<std::size_t>(call.message.bytes);
  std::vector<uint4> messages(kRows * message_bytes / 16 + 1, uint4{~0u, ~0u, ~0u, ~0u});
  auto* const sent = reinterpret_cast<std::byte*>(messages.data());
  std::vector<uint4> memory(RowStream<RowAfterRow>::kBytes / 16);
  on_host::Grid grid(test::seed());
  grid.add(1, 32, [&](unsigned) {
    RowStream<RowAfterRow> stream{reinterpret_cast<std::byte*>(memory.data()),
                                  {reinterpret_cast<const std::byte*>(rows.data()), kRows, bytes}};
    stream.start();
    for (int row = 0; row < kRows; ++row) {
      std::byte* const message = sent + static_cast<std::size_t>(row) * message_bytes;
      Destination to;
      if (threadIdx.x == 0) to.message = to.row = message;
      // Row 3 goes nowhere, but its pieces are taken.
      send_streamed_nvfp4_row(call, to, row == 3 ? 0u : 1u, bytes, stream);
    }
  });
  grid.run();
  for (int row = 0; row < kRows; ++row) {
    if (row == 3) continue;
    const std::vector<float>& values = numbers[static_cast<std::size_t>(row)];
    const float g = oracle::nvfp4_row_scale(values);
    oracle::BlockRow expected = oracle::encode_nvfp4(values, g);
    const std::byte* const message = sent + static_cast<std::size_t>(row) * message_bytes;
    const auto equal = [&](int part, const void* bytes_of_part, std::size_t size) {
      return std::memcmp(message + call.message.part_offset[part], bytes_of_part, size) == 0;
    };
    EXPECT_TRUE(equal(2, &g, sizeof g)) << "row " << row;
    EXPECT_TRUE(equal(1, expected.scales.data(), expected.scales.size())) << "row " << row;
    EXPECT_TRUE(equal(0, expected.values.data(), expected.values.size())) << "row " << row;
  }
}

TEST(Nvfp4Streams, ScaleOfTheWholeRow) {
  std::mt19937_64 random(test::seed());
  for (const DType type : {DType::bf16, DType::fp16}) {
    for (const int hidden : {32, 3552, 3584, 3616, 5376, 7168}) expect_rows(type, hidden, random);
  }
}

// By every thread that had a block whose scale could not be formed.
TEST(Nvfp4Streams, BadScalesAreCounted) {
  constexpr int kHidden = 544;  // 34 blocks
  const PartList parts = parts_of(Format::nvfp4(), kHidden);
  for (const float g : {1.0f, NAN, 0.0f}) {
    LaneState state{};
    DispatchArguments call{};
    call.lane.hidden = kHidden;
    call.lane.state = &state;
    call.type = DType::bf16;
    call.encoding = encoding_of(Format::nvfp4());
    call.message = device_message_layout(parts);
    call.global_scale = &g;
    std::vector<uint4> row(2 * kHidden / 16), memory(RowStream<RowAfterRow>::kBytes / 16),
        message(static_cast<std::size_t>(call.message.bytes) / 16);
    on_host::Grid grid(test::seed());
    grid.add(1, 32, [&](unsigned) {
      RowStream<RowAfterRow> stream{reinterpret_cast<std::byte*>(memory.data()),
                                    {reinterpret_cast<const std::byte*>(row.data()), 1, 2 * kHidden}};
      stream.start();
      Destination to;
      if (threadIdx.x == 0) to.message = to.row = reinterpret_cast<std::byte*>(message.data());
      send_streamed_nvfp4_row(call, to, 1u, 2 * kHidden, stream);
    });
    grid.run();
    EXPECT_EQ(state.diagnostics.bad_scales, g == 1 ? 0u : 32u) << "g = " << g;
  }
}

}  // namespace
}  // namespace ferry::cuda
