#include "group/fault_points.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace ferry {
namespace {

TEST(FaultPoints, HaveDistinctNames) {
  std::set<std::string> names;
  const std::vector<FaultPoint> points = enumerators<FaultPoint>();
  for (const FaultPoint point : points) names.insert(to_string(point));
  EXPECT_EQ(names.size(), points.size());
  EXPECT_EQ(points.back(), FaultPoint::hop_begin);  // the last enumerator: all have names
}

int last_rank = -1;
FaultPoint last_point{};

TEST(FaultPoints, CallTheHookOnlyWhileOneIsSet) {
  fault_point(FaultPoint::dispatch_begin, 1);
  EXPECT_EQ(last_rank, -1);
  set_fault_hook([](FaultPoint point, int rank) {
    last_point = point;
    last_rank = rank;
  });
  fault_point(FaultPoint::combine_waited, 3);
  set_fault_hook(nullptr);
  fault_point(FaultPoint::dispatch_begin, 5);
  EXPECT_EQ(last_rank, 3);
  EXPECT_EQ(last_point, FaultPoint::combine_waited);
}

}  // namespace
}  // namespace ferry
