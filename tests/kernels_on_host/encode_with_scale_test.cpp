// Rows that are encoded where they arrive, by the kernels' code run on the host: every byte is compared with
// the oracle, in rows and in columns, and nothing else is written.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "backends/cuda/dispatch/store_parts.cuh"
#include "kernels_on_host/grid.hpp"
#include "oracle/block_formats.hpp"
#include "oracle/numbers.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

constexpr std::int64_t kTo = 2;  // the row that is written, of four

struct EncodedOnHost {
  std::vector<std::uint8_t> values, scales;  // of the row
  bool reported;
};

// `row`: 16 bytes a unit, so that it is aligned.
EncodedOnHost encode_row(const Format& format, const RowRoom& room, DType type, int hidden,
                         const std::vector<uint4>& row, float scale) {
  LaneState state{};
  DispatchArguments call{};
  call.lane.hidden = hidden;
  call.lane.state = &state;
  call.type = type;
  call.row_encoding = encoding_of(format);
  call.received = parts_by_expert(format, hidden);
  const PartLayout& scales = call.received.part[1];
  const std::int64_t leading = leading_dimension(scales, room);
  call.group_rows = static_cast<std::int32_t>(room.group_rows);
  std::vector<uint4> memory[2];
  const bool has_scales = call.received.count > 1;
  for (int p = 0; p < call.received.count; ++p) {
    const std::int64_t bytes = part_bytes_total(call.received.part[p], room);
    memory[p].assign(static_cast<std::size_t>(bytes / 16 + 2), uint4{~0u, ~0u, ~0u, ~0u});
    call.received_parts[p] = reinterpret_cast<std::byte*>(memory[p].data());
    call.leading_dimension[p] = leading_dimension(call.received.part[p], room);
  }
  on_host::Grid grid(test::seed());
  grid.add(1, 32, [&](unsigned) {
    encode_with_scale(call, reinterpret_cast<const std::byte*>(row.data()), kTo, scale);
  });
  grid.run();
  EncodedOnHost got{{}, {}, state.diagnostics.bad_scales > 0};
  const auto take = [&](int p, std::int64_t offset, std::int64_t bytes, std::vector<std::uint8_t>* to) {
    auto* from = reinterpret_cast<std::uint8_t*>(memory[p].data()) + offset;
    to->insert(to->end(), from, from + bytes);
    std::memset(from, 0xFF, static_cast<std::size_t>(bytes));
  };
  const std::int64_t row_bytes = call.received.part[0].row_bytes;
  take(0, kTo * row_bytes, row_bytes, &got.values);
  const std::int64_t scale_row = column_row(scales, kTo, room.group_rows, leading);
  for (std::int64_t e = 0; has_scales && e < elements_of(scales); ++e)
    take(1, element_offset(scales, scale_row, e, leading), scales.element_bytes, &got.scales);
  for (const std::vector<uint4>& part : memory) {
    for (const uint4& each : part)
      EXPECT_EQ(each.x & each.y & each.z & each.w, ~0u) << to_string(format) << ": another row was written";
  }
  return got;
}

void expect_row(const char* name, const RowRoom& room, DType type, int hidden, float scale,
                std::mt19937_64& random) {
  const Format format = parse_format(name);
  const std::int64_t bytes = hidden * bytes_of(type);
  std::vector<uint4> row(static_cast<std::size_t>(bytes / 16));
  std::vector<float> numbers;
  for (int c = 0; c < hidden; ++c) {
    auto* const at = reinterpret_cast<std::byte*>(row.data()) + c * bytes_of(type);
    const auto word = static_cast<std::uint32_t>(random());
    // Values around 1, and any bits.
    float value = std::ldexp(static_cast<float>(static_cast<int>(word % 2001) - 1000), -8);
    if (random() % 16 == 0) std::memcpy(&value, &word, sizeof value);
    oracle::store(type, value, at);
    numbers.push_back(oracle::load(type, at));
  }
  const EncodedOnHost got = encode_row(format, room, type, hidden, row, scale);
  const bool nvfp4 = format.kind == FormatKind::nvfp4;
  for (float& x : numbers) x = nvfp4 ? x : x / scale;
  std::vector<std::uint8_t> values, scales;
  bool valid = scale > 0 && std::isfinite(scale);
  if (format.kind == FormatKind::fp8_e4m3) {
    for (const float x : numbers) values.push_back(oracle::e4m3(x));
  } else {
    const oracle::BlockRow expected = nvfp4
                                          ? oracle::encode_nvfp4(numbers, scale)
                                          : oracle::encode_mx(numbers, oracle::Element::e4m3, format.mx.rule);
    values = expected.values;
    scales = expected.scales;
    for (const std::uint8_t each : scales) valid = valid && (!nvfp4 || each != 0x7F);
    scales.resize((scales.size() + 3) / 4 * 4);
  }
  SCOPED_TRACE(testing::Message() << name << " from " << to_string(type) << ", H = " << hidden
                                  << ", scale = " << scale << ", rows of a group = " << room.group_rows);
  EXPECT_EQ(got.values, values);
  EXPECT_EQ(got.scales, scales);
  EXPECT_EQ(got.reported, !valid);
}

TEST(EncodeWithScale, EveryByteIsTheOracles) {
  std::mt19937_64 random(test::seed());
  for (const char* name : {"fp8", "mxfp8", "mxfp8-ocp-columns", "nvfp4", "nvfp4-columns"}) {
    for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
      for (const int hidden : {32, 96, 256, 608, 1056}) {
        for (const float scale :
             {1.0f, 0.37f, 3e-5f, 1e-40f, 1e36f, 0.0f, -1.0f, std::numeric_limits<float>::infinity()}) {
          expect_row(name, {.rows = 4, .groups = 2}, type, hidden, scale, random);
          expect_row(name, {.rows = 4, .groups = 2, .group_rows = 2}, type, hidden, scale, random);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry::cuda
