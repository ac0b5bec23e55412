#include "capi/from_c.h"

#include <gtest/gtest.h>

namespace {

TEST(FromC, ThreadsFormAGroupWithFunctionsInC) {
  EXPECT_EQ(from_c_run(), 0) << "line of from_c.c";
}

}  // namespace
