// Fault injection options from the environment. Host code: needs no GPU.
#include "backends/cuda/protocol/fault_injection.hpp"

#include <gtest/gtest.h>

#include "ferry/error.hpp"

namespace ferry::cuda {
namespace {

TEST(FaultInjectionOptions, IsOffByDefault) {
  const FaultInjection none = fault_injection_of(0, "");
  EXPECT_EQ(none.any, 0u);
  EXPECT_EQ(none.probability, 0u);
  EXPECT_EQ(none.stall, KernelPoint::none);
}

TEST(FaultInjectionOptions, ParsesJitterAndStallPoint) {
  const FaultInjection half = fault_injection_of(50, "");
  EXPECT_EQ(half.any, 1u);
  EXPECT_EQ(half.probability, 128u);
  EXPECT_EQ(half.stall, KernelPoint::none);
  const FaultInjection stall = fault_injection_of(0, "row");
  EXPECT_EQ(stall.any, 1u);
  EXPECT_EQ(stall.probability, 0u);
  EXPECT_EQ(stall.stall, KernelPoint::row);
  EXPECT_EQ(fault_injection_of(0, "header").stall, KernelPoint::header);
  EXPECT_EQ(fault_injection_of(0, "poll").stall, KernelPoint::poll);
}

TEST(FaultInjectionOptions, RefusesUnknownStallPoints) {
  try {
    fault_injection_of(0, "rows");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "FERRY_STALL = 'rows', must be header, counts, route_values, metadata, row, flag, "
                 "end_of_stream, poll, "
                 "hop_send, hop_relay or hop_receive");
  }
}

}  // namespace
}  // namespace ferry::cuda
