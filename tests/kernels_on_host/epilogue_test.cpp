// The kernel of the epilogue of combine, run on the host against the oracle.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <random>

#include "backends/cuda/combine/epilogue.cuh"
#include "kernels_on_host/lanes.hpp"
#include "oracle/combine.hpp"
#include "oracle/numbers.hpp"
#include "seed.hpp"

namespace ferry::cuda::epilogue_test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::int32_t kTokens = 5, kHidden = 600;
constexpr std::int64_t kGap = 32;  // bytes between rows, which must stay as they are
constexpr std::byte kUntouched{0xA5};

// [N, H] with rows `stride` bytes apart, at an aligned address.
class Rows {
 public:
  Rows(DType type, std::int64_t stride, std::uint64_t seed)
      : row_bytes_(kHidden * bytes_of(type)), stride_(stride) {
    std::mt19937_64 random(seed);
    dense_.resize(static_cast<std::size_t>(kTokens * row_bytes_));
    for (std::byte& each : dense_) each = static_cast<std::byte>(random());  // NaN and infinities too
    std::fill_n(dense_.begin(), 32, std::byte{0});  // +0 times a negative scale is -0
    place(dense_);
  }

  void place(const Bytes& dense) {
    lines_.assign(static_cast<std::size_t>(kTokens * stride_ / 16), Line{});
    std::fill_n(data(), kTokens * stride_, kUntouched);
    for (std::int64_t row = 0; row < kTokens; ++row)
      std::copy_n(dense.begin() + row * row_bytes_, row_bytes_, data() + row * stride_);
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(lines_.data()); }
  Bytes bytes() { return {data(), data() + kTokens * stride_}; }
  const Bytes& dense() const { return dense_; }

 private:
  struct alignas(16) Line {
    std::byte bytes[16];
  };
  std::int64_t row_bytes_, stride_;
  Bytes dense_;
  std::vector<Line> lines_;
};

PlanHeader header_of(const LaneView& lane, std::int32_t tokens) {
  PlanHeader header{};
  header.magic = kPlanMagic;
  header.config_hash = lane.epoch->row_order_hash;
  header.rank = lane.rank;
  header.tokens = tokens;
  header.check = header_check(header);
  return header;
}

class EpilogueKernel : public testing::Test {
 protected:
  EpilogueKernel() : view_(lanes_.view(0)) {
    view_.hidden = kHidden;
    view_.max_tokens = kTokens;
    lanes_.state(0).calls[0] = 3;
  }

  void run(EpilogueArguments call, DType type) {
    on_host::Grid grid(test::seed());
    grid.add(2, kEpilogueThreads, [call, type](unsigned) {
      if (type == DType::bf16) return run_epilogue<DType::bf16>(call);
      if (type == DType::fp16) return run_epilogue<DType::fp16>(call);
      run_epilogue<DType::fp32>(call);
    });
    grid.run();
  }

  EpilogueArguments arguments(PlanHeader* header, DType type, Rows& result) {
    EpilogueArguments call{};
    call.lane = view_;
    call.plan.header = header;
    call.result = result.data();
    call.result_stride = kHidden * bytes_of(type) + kGap;
    call.type = type;
    call.scale = -0.3f;
    return call;
  }

  HostLanes lanes_{1, kTokens, 64};
  LaneView view_;
};

TEST_F(EpilogueKernel, ScalesAndAddsTheResidual) {
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    for (const bool adds : {false, true}) {
      const std::int64_t row_bytes = kHidden * bytes_of(type);
      Rows result(type, row_bytes + kGap, test::seed() + 1), residual(type, row_bytes + 16, test::seed() + 2);
      PlanHeader header = header_of(view_, kTokens);
      EpilogueArguments call = arguments(&header, type, result);
      if (adds) call.residual = residual.data();
      call.residual_stride = row_bytes + 16;
      Rows expected = result;
      expected.place(
          oracle::with_epilogue(type, result.dense(), call.scale, adds ? residual.dense().data() : nullptr));
      run(call, type);
      EXPECT_EQ(result.bytes(), expected.bytes()) << to_string(type) << ", residual " << adds;
    }
  }
}

TEST_F(EpilogueKernel, WritesOnlyTheTokensOfThePlan) {
  Rows result(DType::bf16, 2 * kHidden + kGap, test::seed());
  PlanHeader header = header_of(view_, 2);
  const Bytes before = result.bytes();
  run(arguments(&header, DType::bf16, result), DType::bf16);
  const Bytes after = result.bytes();
  const auto end = 2 * (2 * kHidden + kGap);
  EXPECT_NE(Bytes(after.begin(), after.begin() + end), Bytes(before.begin(), before.begin() + end));
  EXPECT_EQ(Bytes(after.begin() + end, after.end()), Bytes(before.begin() + end, before.end()));
}

TEST_F(EpilogueKernel, WritesNothingAfterAnAbortedCallOrWithADamagedPlan) {
  Rows result(DType::bf16, 2 * kHidden + kGap, test::seed());
  const Bytes before = result.bytes();
  PlanHeader header = header_of(view_, kTokens);
  ++header.tokens;
  run(arguments(&header, DType::bf16, result), DType::bf16);
  EXPECT_EQ(result.bytes(), before);
  --header.tokens;
  lanes_.state(0).aborted_call.value = 3;
  run(arguments(&header, DType::bf16, result), DType::bf16);
  EXPECT_EQ(result.bytes(), before);
}

}  // namespace
}  // namespace ferry::cuda::epilogue_test
