#include "capi/from_c.h"

#include <gtest/gtest.h>

namespace {

TEST(FromC, ThreadsMeetByFunctionsInC) {
  EXPECT_EQ(from_c_meet(), 0) << "line of from_c.c";
}

}  // namespace
