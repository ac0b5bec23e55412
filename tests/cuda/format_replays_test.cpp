// Every format in CUDA graphs: replays read N, the ids, nvfp4's g and the scales of experts anew.
#include "cuda/device_test.hpp"
#include "cuda/replays.hpp"
#include "harness/own_format.hpp"

namespace ferry::contract {
namespace {

class CudaFormatReplays : public DeviceTest {
 protected:
  static TestCase format_case(const char* format, std::uint64_t number) {
    TestCase c = device_case(number, 2);
    c.config.format = parse_format(format);
    c.config.shared_experts = number % 2 == 0 ? 1 : 0;
    c.config.alignment = 4;
    return c;
  }
};

TEST_F(CudaFormatReplays, ScalesInRows) {
  replay_often(format_case("mxfp8", 1));
  replay_often(format_case("mxfp4-columns", 2));
  TestCase c = format_case("nvfp4", 3);
  c.global_scale = 0.0123f;
  replay_often(c);
  replay_often(format_case("nvfp4-token", 4));
}

TEST_F(CudaFormatReplays, ScalesAsTiles) {
  replay_often(format_case("mxfp8-tiles", 5));
  TestCase c = format_case("nvfp4-tiles", 6);
  c.config.layout = Layout::expert_padded;
  c.split_phases = true;
  replay_often(c);
  c = format_case("nvfp4-token-tiles", 7);
  c.config.max_tokens = 300;
  replay_often(c);
}

// Each group has columns of its own.
TEST_F(CudaFormatReplays, ScalesInColumnsOfPaddedGroups) {
  TestCase c = format_case("fp8-columns-pow2-packed", 11);
  c.config.layout = Layout::expert_padded;
  replay_often(c);
  c = format_case("mxfp8-columns", 12);
  c.config.layout = Layout::expert_padded;
  c.split_phases = true;
  replay_often(c);
}

TEST_F(CudaFormatReplays, ScalesOfEachExpert) {
  TestCase c = format_case("nvfp4-tiles", 8);
  c.input_scales = true;
  replay_often(c);
  c = format_case("mxfp8", 9);
  c.input_scales = c.split_phases = true;
  replay_often(c);
  c = format_case("fp8", 10);
  c.input_scales = true;
  c.config.layout = Layout::expert_padded;
  replay_often(c);
}

// The encoder of a registered format is captured with the dispatch, and reads N when the graph runs.
TEST_F(CudaFormatReplays, OfAFormatOfTheTests) {
  static const Format copy = register_format("test_replayed_copy", copying_encoder());
  replay_often(format_case("bf16", 11), {.as = copy});
  TestCase c = format_case("bf16", 12);
  c.split_phases = true;
  c.config.layout = Layout::expert_padded;
  replay_often(c, {.as = copy});
}

}  // namespace
}  // namespace ferry::contract
