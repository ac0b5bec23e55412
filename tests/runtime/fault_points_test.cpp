#include "group/fault_points.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace ferry {
namespace {

TEST(FaultPoints, HaveDistinctNames) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < kFaultPoints.size(); ++i) {
    EXPECT_EQ(static_cast<std::size_t>(kFaultPoints[i]), i);
    names.insert(to_string(kFaultPoints[i]));
  }
  EXPECT_EQ(names.size(), kFaultPoints.size());
  EXPECT_EQ(names.count("unknown"), 0u);
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
