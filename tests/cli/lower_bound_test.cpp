// Lower bounds of benchmark points, compared with counts made by hand.
#include "tools/ferry/bench/traffic.hpp"

#include <gtest/gtest.h>

namespace ferry::app {
namespace {

// Two ranks of two experts each, H = 256. Rank 0 routes tokens {0, 1}, {2, 3}, {0, 2}; rank 1 {2, 3}, {3,
// -1}, {0, 1}; all layers and therefore all sets are equal.
Trace small_trace() {
  Trace trace;
  trace.name = "by hand";
  trace.layers = 1;
  trace.tokens = 6;
  trace.top_k = 2;
  trace.experts = 4;
  trace.ids = {0, 1, 2, 3, 0, 2, 2, 3, 3, -1, 0, 1};
  trace.weights.assign(trace.ids.size(), 0.5f);
  return trace;
}

BenchPoint point_of(const Trace& trace, const Format& format) {
  BenchPoint point;
  point.trace = &trace;
  point.ranks = 2;
  point.tokens = 3;
  point.config.experts = 4;
  point.config.top_k = 2;
  point.config.hidden = 256;
  point.config.max_tokens = 3;
  point.config.placement = Placement::blocks(4, 2);
  point.config.format = format;
  return point;
}

class LowerBound : public testing::Test {
 protected:
  double bytes(const Format& format, const TimedCall& call) const {
    const BenchPoint point = point_of(trace_, format);
    return lower_bound_bytes(point, call, busiest_remote_rows(point, BenchInputs(point)));
  }

  const Trace trace_ = small_trace();
};

// Rank 0 sends 2 pairs and 3 routes and receives 1 and 2; rank 1 the other way round.
TEST_F(LowerBound, CountsTheBusierDirection) {
  const BenchPoint point = point_of(trace_, Format::bf16());
  const RemoteRows busiest = busiest_remote_rows(point, BenchInputs(point));
  EXPECT_EQ(busiest.pairs, 2);
  EXPECT_EQ(busiest.routes, 3);
}

TEST_F(LowerBound, OfDispatchIsTheValuesAndScalesOfPairs) {
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::dispatch}), 2 * 512);
  EXPECT_EQ(bytes(Format::fp32(), {.work = Work::dispatch_plan}), 2 * 1024);
  EXPECT_EQ(bytes(Format::fp8_e4m3(), {.work = Work::dispatch}), 2 * (256 + 2 * 4));
}

TEST_F(LowerBound, OfCombineDependsOnWhereSumsAreComputed) {
  EXPECT_EQ(bytes(Format::fp8_e4m3(), {.work = Work::combine}), 2 * 512);
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::combine, .reduction = Reduction::exact}), 3 * 512);
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::combine, .reduction = Reduction::unreduced}), 3 * 512);
}

TEST_F(LowerBound, OfAPairIsTheSumOfBoth) {
  EXPECT_EQ(bytes(Format::fp8_e4m3(), {.work = Work::pair}), 2 * (256 + 2 * 4) + 2 * 512);
}

TEST_F(LowerBound, OfNcclIsThatOfDispatch) {
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::nccl}), 2 * 512);
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::nccl_rows}), 2 * 512);
}

TEST_F(LowerBound, OfMetadataIsZero) {
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::metadata}), 0);
}

}  // namespace
}  // namespace ferry::app
