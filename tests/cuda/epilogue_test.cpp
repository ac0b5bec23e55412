// The epilogue of combine in CUDA graphs: a launch of its own behind the combine, for the N of each replay.
#include "cuda/device_test.hpp"
#include "cuda/replays.hpp"

namespace ferry::contract {
namespace {

class CudaEpilogue : public DeviceTest {
 protected:
  static void replay(TestCase c, float scale, bool adds) {
    c.config.deadline = 4;
    replay_often(c, [&](DeviceRun& device_run) { device_run.set_epilogue(scale, adds); });
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

}  // namespace
}  // namespace ferry::contract
