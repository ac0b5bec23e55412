// The names of formats and enumerators.
#include <gtest/gtest.h>

#include "ferry/format.hpp"
#include "refusal.hpp"

namespace ferry {
namespace {

TEST(FormatNames, AreReadAsTheyAreWritten) {
  const std::pair<Format, const char*> names[] = {
      {Format::bf16(), "bf16"},
      {Format::fp16(), "fp16"},
      {Format::fp32(), "fp32"},
      {Format::fp8_e4m3(), "fp8"},
      {Format::fp8_e4m3({.power_of_two = true}), "fp8-pow2"},
      {Format::fp8_e4m3({.power_of_two = true, .packed = true}), "fp8-pow2-packed"},
      {Format::fp8_e4m3({.column_major = true}), "fp8-columns"},
      {Format::fp8_e4m3({.column_major = true, .power_of_two = true}), "fp8-columns-pow2"},
      {Format::fp8_e4m3({.column_major = true, .power_of_two = true, .packed = true}),
       "fp8-columns-pow2-packed"},
      {Format::mxfp8(), "mxfp8"},
      {Format::mxfp8({.rule = MxRule::ocp}), "mxfp8-ocp"},
      {Format::mxfp8({.column_major = true}), "mxfp8-columns"},
      {Format::mxfp4(), "mxfp4"},
      {Format::mxfp4({.rule = MxRule::up, .column_major = true}), "mxfp4-up-columns"},
      {Format::mxfp8({.rule = MxRule::ocp, .tiles = true}), "mxfp8-ocp-tiles"},
      {Format::mxfp4({.rule = MxRule::ocp, .tiles = true}), "mxfp4-tiles"},
      {Format::nvfp4({.tiles = true}), "nvfp4-tiles"},
      {Format::nvfp4({.per_token = true, .tiles = true}), "nvfp4-token-tiles"},
      {Format::nvfp4(), "nvfp4"},
      {Format::nvfp4({.per_token = true, .column_major = true}), "nvfp4-token-columns"},
      {Format::raw({1024}), "raw:1024"},
      {Format::raw({1024, 64}), "raw:1024+64"},
      {Format::raw({16, 32, 48, 64}), "raw:16+32+48+64"},
  };
  for (const auto& [format, name] : names) {
    EXPECT_EQ(to_string(format), name);
    EXPECT_EQ(parse_format(name), format) << name;
  }
}

TEST(FormatNames, TakeOptionsInAnyOrder) {
  EXPECT_EQ(parse_format("fp8-packed-pow2-columns"), parse_format("fp8-columns-pow2-packed"));
  EXPECT_EQ(parse_format("mxfp4-columns-up"), parse_format("mxfp4-up-columns"));
  EXPECT_EQ(parse_format("mxfp4-ocp"), Format::mxfp4());
}

TEST(FormatProperties, SayWhatRowsHold) {
  for (const Format& format : {Format::bf16(), Format::fp16(), Format::fp32()}) {
    EXPECT_FALSE(format.quantises());
    EXPECT_FALSE(format.is_raw());
    ASSERT_TRUE(format.value_type());
    EXPECT_EQ(to_string(*format.value_type()), to_string(format));
  }
  for (const char* name : {"fp8", "fp8-columns", "fp8-pow2-packed", "mxfp8", "mxfp4-up"}) {
    EXPECT_TRUE(parse_format(name).quantises()) << name;
    EXPECT_FALSE(parse_format(name).is_raw()) << name;
    EXPECT_FALSE(parse_format(name).value_type()) << name;
  }
  EXPECT_TRUE(Format::raw({16}).is_raw());
  EXPECT_FALSE(Format::raw({16}).quantises());
  EXPECT_FALSE(Format::raw({16}).value_type());
}

std::string refusal(const std::string& name) {
  return test::refusal([&] { parse_format(name); });
}

TEST(FormatNames, RefuseAllOtherText) {
  for (const char* name : {"",
                           "bf17",
                           "BF16",
                           "bf16 ",
                           "fp8-",
                           "fp8-pow",
                           "fp8-pow2-pow2",
                           "fp8--pow2",
                           "fp8pow2",
                           "fp8-packed",
                           "fp8-columns-packed",
                           "raw",
                           "raw:",
                           "raw:16+",
                           "raw:+16",
                           "raw:16++16",
                           "raw:1k",
                           "raw:16,16",
                           "raw:99999999999999999999",
                           "raw:16+16+16+16+16",
                           "raw:15",
                           "raw:0",
                           "raw:-16",
                           "raw:16+0",
                           "fp8-tiles",
                           "bf16-tiles",
                           "mxfp8-columns-tiles",
                           "nvfp4-tiles-columns"}) {
    EXPECT_NE(refusal(name), "accepted") << "'" << name << "'";
  }
  EXPECT_TRUE(
      refusal("fp8-pow3").starts_with("format 'fp8-pow3': '-pow3' is not an option of fp8; known: bf16,"));
  EXPECT_TRUE(refusal("raw:1x").starts_with("format 'raw:1x': '1x' is not a number of bytes; known:"));
}

TEST(FormatNames, RawSizesAreCheckedAtOnce) {
  EXPECT_THROW(Format::raw({}), UsageError);
  EXPECT_THROW(Format::raw({16, 16, 16, 16, 16}), UsageError);
  EXPECT_THROW(Format::raw({17}), UsageError);
}

TEST(Names, OfEnumerators) {
  EXPECT_STREQ(to_string(DType::fp16), "fp16");
  EXPECT_STREQ(to_string(Layout::expert_padded), "expert_padded");
  EXPECT_STREQ(to_string(Reduction::unreduced), "unreduced");
  EXPECT_STREQ(to_string(BackendKind::cuda), "cuda");
  EXPECT_STREQ(to_string(BackendKind::nvshmem), "nvshmem");
  EXPECT_STREQ(to_string(static_cast<DType>(7)), "unknown");
  EXPECT_STREQ(to_string(static_cast<DType>(-1)), "unknown");
}

}  // namespace
}  // namespace ferry
