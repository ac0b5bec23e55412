// What becomes of a slot: the classification that host planner and kernels share.
#include "plan/slot.hpp"

#include <gtest/gtest.h>

#include <cstdint>

namespace ferry {
namespace {

constexpr std::int64_t kBeyond32Bits = std::int64_t{1} << 32;

TEST(Slot, IdsAreMaskedBadOrExperts) {
  EXPECT_EQ(classify_id(-1, 4), IdKind::masked);
  for (const std::int64_t id : {std::int64_t{-2}, std::int64_t{4}, kBeyond32Bits, -kBeyond32Bits - 1})
    EXPECT_EQ(classify_id(id, 4), IdKind::bad) << id;
  for (const std::int64_t id : {0, 3}) EXPECT_EQ(classify_id(id, 4), IdKind::expert) << id;
}

TEST(Slot, RanksOfExpertsAreLookedUpAlone) {
  int calls = 0;
  const auto kind = [&](std::int64_t id) {
    return classify_slot(id, 4, 1, [&](std::int32_t expert) {
      ++calls;
      return expert / 2;
    });
  };
  EXPECT_EQ(kind(-1), SlotKind::masked);
  EXPECT_EQ(kind(kBeyond32Bits), SlotKind::bad);
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(kind(1), SlotKind::remote);
  EXPECT_EQ(kind(2), SlotKind::local);
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace ferry
