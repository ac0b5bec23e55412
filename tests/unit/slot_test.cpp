// The classification of slots, which host planner and kernels share.
#include "plan/slot.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

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

TEST(Slot, OfSharedExpertsComeAfterTheSlotsOfIds) {
  EXPECT_FALSE(is_shared_slot(0, 3));
  EXPECT_FALSE(is_shared_slot(2, 3));
  EXPECT_TRUE(is_shared_slot(3, 3));
}

TEST(Slot, OfReplicatedInputAreKeptWhereTheirExpertsAre) {
  EXPECT_TRUE(keeps_route(Input::own, 1, 0));
  EXPECT_TRUE(keeps_route(Input::replicated, 1, 1));
  EXPECT_FALSE(keeps_route(Input::replicated, 1, 0));
}

TEST(Slot, IdsOfSlices) {
  constexpr ExpertSlices slices{8, 4};
  EXPECT_EQ(slices.id_of_slice(0, 0), 0);
  EXPECT_EQ(slices.id_of_slice(5, 3), 23);
  EXPECT_EQ(classify_id(slices.id_of_slice(7, 3), slices.experts * slices.tp), IdKind::expert);
  EXPECT_EQ(slices.id_of_slice(-1, 2), -1);
  for (const std::int64_t bad :
       {std::int64_t{-2}, std::int64_t{8}, std::int64_t{31}, std::int64_t{32}, kBeyond32Bits}) {
    const std::int64_t inside = slices.id_of_slice(bad, 1);
    EXPECT_EQ(classify_id(inside, slices.experts * slices.tp), IdKind::bad) << bad;
    EXPECT_EQ(slices.unsliced_bad_id(inside), bad);
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(slices.id_of_slice(kMost, 0), kMost);
}

TEST(Slot, TokensOfSlicesCoverAllAndDifferByOneAtMost) {
  for (const int tp : {1, 2, 3, 4, 8}) {
    for (const std::int64_t tokens : {0, 1, 2, 7, 4095}) {
      std::int64_t end = 0;
      for (int i = 0; i < tp; ++i) {
        const TokenSlice slice = TokenSlice::of(tokens, i, tp);
        EXPECT_EQ(slice.first, end);
        EXPECT_GE(slice.count, tokens / tp);
        EXPECT_LE(slice.count, tokens / tp + 1);
        end += slice.count;
      }
      EXPECT_EQ(end, tokens);
    }
  }
}

}  // namespace
}  // namespace ferry
