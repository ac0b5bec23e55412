// Expects that the C and the C++ interface return the same bytes.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "ferry/exchange.hpp"
#include "ferry/ferry.h"

namespace ferry::capi_test {

template <class T, class U>
void expect_same_array(const T* c, const U* cpp, std::int64_t count, const char* what) {
  static_assert(sizeof(T) == sizeof(U));
  ASSERT_EQ(c == nullptr, cpp == nullptr) << what;
  if (c == nullptr || count == 0) return;
  EXPECT_EQ(std::memcmp(c, cpp, static_cast<std::size_t>(count) * sizeof(T)), 0) << what;
}

inline void expect_same_part(const ferry_received_part& c, const ReceivedPart& cpp,
                             const DispatchResult& rows, std::int64_t columns, const std::string& what) {
  ASSERT_EQ(c.data == nullptr, cpp.data == nullptr) << what;
  EXPECT_EQ(c.row_bytes, cpp.row_bytes) << what;
  EXPECT_EQ(c.leading_dimension, cpp.leading_dimension) << what;
  if (c.data == nullptr) return;
  if (rows.tile_offsets != nullptr && c.data != rows.data && cpp.row_bytes % 512 == 0) {
    for (int group = 0; group < rows.groups; ++group) {
      const std::int64_t begin = c.row_bytes * rows.tile_offsets[group],
                         bytes = (rows.counts[group] + 127) / 128 * c.row_bytes;
      EXPECT_EQ(std::memcmp(static_cast<const char*>(c.data) + begin,
                            static_cast<const char*>(cpp.data) + begin, static_cast<std::size_t>(bytes)),
                0)
          << what << ", group " << group;
    }
    return;
  }
  const bool column_major = c.leading_dimension > 0;
  const std::int64_t group_step = columns * c.leading_dimension;  // each group has columns of its own
  for (std::int64_t row = 0; row < *rows.total; ++row) {
    if (rows.source[row].rank < 0) continue;  // padding may hold any bytes
    for (std::int64_t column = 0; column < (column_major ? columns : 1); ++column) {
      const std::int64_t in_columns = row / rows.capacity * group_step + row % rows.capacity,
                         at = (column_major ? column * c.leading_dimension + in_columns : row) * c.row_bytes;
      EXPECT_EQ(std::memcmp(static_cast<const char*>(c.data) + at, static_cast<const char*>(cpp.data) + at,
                            static_cast<std::size_t>(c.row_bytes)),
                0)
          << what << ", row " << row << ", column " << column;
    }
  }
}

inline void expect_same(const ferry_dispatch_result& c, const DispatchResult& cpp, const Config& config) {
  ASSERT_NE(c.total, nullptr);
  const std::int64_t total = *cpp.total;
  ASSERT_EQ(*c.total, total);
  EXPECT_EQ(c.data, c.parts[0].data);
  ASSERT_EQ(c.groups, cpp.groups);
  EXPECT_EQ(c.capacity, cpp.capacity);
  EXPECT_EQ(c.call, cpp.call);
  EXPECT_EQ(c.host->call, cpp.host->call);
  EXPECT_EQ(c.host->total, total);
  expect_same_array(c.counts, cpp.counts, c.groups, "counts");
  expect_same_array(c.row_offsets, cpp.row_offsets, c.groups + 1, "row_offsets");
  expect_same_array(c.tile_offsets, cpp.tile_offsets, c.groups + 1, "tile_offsets");
  expect_same_array(c.group_expert, cpp.group_expert, c.groups, "group_expert");
  expect_same_array(c.source, cpp.source, total, "source");
  const std::int64_t per_row = config.layout == Layout::rank_major ? config.top_k : 1;
  expect_same_array(c.weight, cpp.weight, total * per_row, "weight");
  expect_same_array(c.local_ids, cpp.local_ids, total * per_row, "local_ids");
  expect_same_array(c.group_of_row, cpp.group_of_row, total, "group_of_row");
  expect_same_array(c.dots, cpp.dots, total, "dots");
  EXPECT_EQ(c.plan.bytes, cpp.plan.bytes());
  for (int p = 0; p < kMaxParts; ++p) {
    expect_same_part(c.parts[p], cpp.parts[p], cpp, (config.hidden + 127) / 128, "part " + std::to_string(p));
  }
}

}  // namespace ferry::capi_test
