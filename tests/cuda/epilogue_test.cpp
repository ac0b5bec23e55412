// The epilogue of combine in CUDA graphs: a launch of its own behind the combine, for the N of each replay.
// And an epilogue of the caller's.
#include <cstring>

#include "cuda/device_test.hpp"
#include "cuda/own_epilogue.hpp"
#include "cuda/replays.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

class CudaEpilogue : public DeviceTest {
 protected:
  static void replay(TestCase c, float scale, bool adds) {
    c.config.deadline = 4;
    replay_often(c, {.prepare = [&](DeviceRun& device_run) { device_run.set_epilogue(scale, adds); }});
  }
};

TEST_F(CudaEpilogue, ReplaysScaleAndAdd) {
  TestCase c = device_case(1, 3);
  replay(c, -0.3f, true);
  c.result = DType::fp32;
  c.split_phases = true;
  replay(c, 1, true);
}

TEST_F(CudaEpilogue, ReplaysWithSharedExperts) {
  TestCase c = device_case(2, 2);
  c.config.shared_experts = 2;
  c.reduction = c.config.reduction = Reduction::exact;
  replay(c, 2.5f, false);
}

// Rows of `type` with gaps between them, some of which are results.
void compare_own_epilogue(DType type, std::int64_t stride, std::int64_t rows, std::int64_t counted,
                          int blocks) {
  constexpr int kColumns = 72;
  constexpr std::int64_t kRows = 40;
  const std::int64_t value = bytes_of(type), step = stride != 0 ? stride : kColumns * value;
  Random random(seed_of(static_cast<std::uint64_t>(1000 * static_cast<int>(type) + stride + rows)));
  std::vector<std::byte> memory(static_cast<std::size_t>(kRows * step), kPoison);
  const std::vector<float> bias = random_floats(random, kColumns);
  for (std::int64_t row = 0; row < kRows; ++row) {
    const std::vector<float> values = random_floats(random, kColumns);
    for (int c = 0; c < kColumns; ++c)
      oracle::store(type, values[static_cast<std::size_t>(c)], memory.data() + row * step + c * value);
  }
  const DeviceBytes result(memory), device_bias(bytes_of_values(bias)),
      count(bytes_of_values(std::vector<std::int32_t>{static_cast<std::int32_t>(counted)}));
  const TestStream stream;
  apply_own_epilogue({.data = result.data(), .type = type, .stride = stride}, rows, kColumns,
                     device_bias.as<float>(), counted >= 0 ? count.as<std::int32_t>() : nullptr, blocks,
                     stream.get());
  stream.synchronize();
  const std::int64_t changed = counted >= 0 ? std::min(counted, rows) : rows;
  for (std::int64_t row = 0; row < changed; ++row) {
    for (int c = 0; c < kColumns; ++c) {
      std::byte* at = memory.data() + row * step + c * value;
      oracle::store(type, own_epilogue(oracle::load(type, at), row, bias[static_cast<std::size_t>(c)]), at);
    }
  }
  EXPECT_TRUE(result.to_host() == memory) << to_string(type) << ", stride " << stride << ", " << rows
                                          << " rows, of which " << counted << ", " << blocks << " blocks";
}

TEST_F(CudaEpilogue, OfTheCallers) {
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    compare_own_epilogue(type, 0, 40, -1, 0);
    compare_own_epilogue(type, 320, 33, -1, 3);
    compare_own_epilogue(type, 0, 40, 17, 0);
    compare_own_epilogue(type, 0, 20, 31, 0);  // a count beyond the rows
    compare_own_epilogue(type, 0, 0, -1, 0);
  }
}

}  // namespace
}  // namespace ferry::contract
