// Shared experts, replicated and gathered input in CUDA graphs: replays read N and the ids anew.
#include "cuda/device_test.hpp"
#include "cuda/replays.hpp"

namespace ferry::contract {
namespace {

class CudaSharedReplays : public DeviceTest {
 protected:
  static TestCase shared_case(std::uint64_t number, int shared_experts) {
    TestCase c = device_case(number, 3);
    c.config.shared_experts = shared_experts;
    c.config.alignment = 4;
    return c;
  }
  static TestCase replicated_case(std::uint64_t number) {
    TestCase c = device_case(number, 3);
    c.config.input = Input::replicated;
    return c;
  }
};

TEST_F(CudaSharedReplays, AddedToTheSums) {
  replay_often(shared_case(1, 1));
  replay_often(shared_case(2, 2));
}

TEST_F(CudaSharedReplays, OfManyTokens) {
  TestCase c = shared_case(3, 2);
  c.config.max_tokens = 300;
  replay_often(c);
}

TEST_F(CudaSharedReplays, InPhasesAsFp8) {
  TestCase c = shared_case(4, 2);
  c.config.format = Format::fp8_e4m3();
  c.config.layout = Layout::expert_padded;
  c.split_phases = true;
  replay_often(c);
  c.config.layout = Layout::expert_major;
  c.split_phases = false;
  replay_often(c);
}

TEST_F(CudaSharedReplays, HandedOut) {
  TestCase c = shared_case(5, 2);
  c.shared_outputs = true;
  c.reduction = c.config.reduction = Reduction::exact;
  replay_often(c);
}

TEST_F(CudaSharedReplays, OutputsOfAnotherType) {
  TestCase c = shared_case(6, 2);
  c.outputs = DType::fp32;
  c.reduction = c.config.reduction = Reduction::exact;
  replay_often(c);
}

TEST_F(CudaSharedReplays, ReplicatedInput) {
  TestCase c = replicated_case(7);
  replay_often(c);
  c.config.max_tokens = 300;
  replay_often(c);
  c.config.format = Format::fp8_e4m3();
  replay_often(c);
}

TEST_F(CudaSharedReplays, GatheredInput) {
  TestCase c = device_case(9, 3);
  c.config.transfer = Transfer::gather;
  c.config.deadline = 6;
  replay_often(c);
  c.config.format = Format::fp8_e4m3();
  c.split_phases = true;
  replay_often(c);
  c.split_phases = false;
  c.config.max_tokens = 300;
  c.config.shared_experts = 1;
  replay_often(c);
}

TEST_F(CudaSharedReplays, ReplicatedInputWithSplitSharedRows) {
  TestCase c = replicated_case(8);
  c.config.shared_experts = 2;
  c.config.shared_split = 2;
  replay_often(c);
  c.split_phases = true;
  replay_often(c);
}

}  // namespace
}  // namespace ferry::contract
