#include <gtest/gtest.h>

#include "ferry/error.hpp"
#include "trace/files.hpp"
#include "trace/trace.hpp"

namespace {

using ferry::parse_synth_spec;
using ferry::SynthSpec;
using ferry::UsageError;
using ferry::Workload;

TEST(SynthSpec, ReadsNames) {
  EXPECT_EQ(parse_synth_spec("synth:decode").workload, Workload::decode);
  EXPECT_EQ(parse_synth_spec("synth:prefill").workload, Workload::prefill);
  EXPECT_EQ(parse_synth_spec("synth:uniform").workload, Workload::uniform);
  EXPECT_FALSE(parse_synth_spec("synth:decode").grouped);
  EXPECT_TRUE(parse_synth_spec("synth:decode-grouped").grouped);
  EXPECT_EQ(parse_synth_spec("synth:prefill-grouped").workload, Workload::prefill);
}

TEST(SynthSpec, KeysOverrideDefaults) {
  const SynthSpec defaults{.experts = 128, .top_k = 4, .tokens = 17, .layers = 2, .seed = 9};
  const SynthSpec spec = parse_synth_spec(
      "synth:prefill:experts=64,tokens=100,seed=18446744073709551615,block_sigma=0.5", defaults);
  EXPECT_EQ(spec.experts, 64);
  EXPECT_EQ(spec.top_k, 4);
  EXPECT_EQ(spec.tokens, 100);
  EXPECT_EQ(spec.layers, 2);
  EXPECT_EQ(spec.seed, 18446744073709551615u);
  EXPECT_EQ(spec.block_sigma, 0.5);
}

TEST(SynthSpec, ReadsItsOwnText) {
  for (const char* text :
       {"synth:decode:experts=256,top_k=8,tokens=4096,layers=4,seed=1,block_sigma=0.3",
        "synth:prefill-grouped:experts=64,top_k=6,tokens=5,layers=1,seed=77,block_sigma=0.123",
        "synth:uniform:experts=8,top_k=2,tokens=5,layers=1,seed=0"}) {
    EXPECT_EQ(ferry::trace::to_string(parse_synth_spec(text)), text);
  }
}

TEST(SynthSpec, RefusesTextThatIsNoSpecification) {
  for (const char* text : {"synth:", "synth:what", "synth:-grouped", "synth:decode-group",
                           "synth:decodeexperts=4", "synth:decode-grouped-grouped"}) {
    EXPECT_THROWS(parse_synth_spec(text), UsageError, "expected synth:decode");
  }
  EXPECT_THROWS(parse_synth_spec("decode"), UsageError, "starts with 'synth:'");
  EXPECT_THROWS(parse_synth_spec("synth:decode:"), UsageError, "expected a key");
  EXPECT_THROWS(parse_synth_spec("synth:decode:experts=8,"), UsageError, "found ''");
  EXPECT_THROWS(parse_synth_spec("synth:decode:expert=8"), UsageError, "found 'expert'");
  EXPECT_THROWS(parse_synth_spec("synth:decode:experts"), UsageError, "experts: expected a number, found ''");
  EXPECT_THROWS(parse_synth_spec("synth:decode:experts=8x"), UsageError, "found '8x'");
  EXPECT_THROWS(parse_synth_spec("synth:decode:experts= 8"), UsageError, "found ' 8'");
  EXPECT_THROWS(parse_synth_spec("synth:decode:experts=8.5"), UsageError, "found '8.5'");
  EXPECT_THROWS(parse_synth_spec("synth:decode:experts=99999999999"), UsageError, "out of range");
  EXPECT_THROWS(parse_synth_spec("synth:decode:seed=-1"), UsageError, "seed: expected a number, found '-1'");
  EXPECT_THROWS(parse_synth_spec("synth:uniform:block_sigma=1"), UsageError,
                "block_sigma is not used by synth:uniform");
}

TEST(SynthSpec, RefusesSpecificationsThatNoTraceCanSatisfy) {
  EXPECT_THROWS(parse_synth_spec("synth:decode:experts=0"), UsageError,
                "experts: expected 1 to 65536, found 0");
  EXPECT_THROWS(parse_synth_spec("synth:decode:experts=65537"), UsageError, "found 65537");
  EXPECT_THROWS(parse_synth_spec("synth:decode:experts=4"), UsageError, "top_k: expected 1 to 4, found 8");
  EXPECT_THROWS(parse_synth_spec("synth:decode:top_k=33"), UsageError, "top_k: expected 1 to 32, found 33");
  EXPECT_THROWS(parse_synth_spec("synth:decode:top_k=0"), UsageError, "found 0");
  EXPECT_THROWS(parse_synth_spec("synth:decode:tokens=0"), UsageError, "tokens: expected 1 to");
  EXPECT_THROWS(parse_synth_spec("synth:decode:tokens=-5"), UsageError, "found -5");
  EXPECT_THROWS(parse_synth_spec("synth:decode:layers=0"), UsageError, "layers: expected 1 to 1024");
  EXPECT_THROWS(parse_synth_spec("synth:decode:layers=1024,tokens=2147483647,top_k=32"), UsageError,
                "expected layers * tokens * top_k of at most 268435456, found 70368744144896");
  EXPECT_THROWS(parse_synth_spec("synth:decode:block_sigma=-0.1"), UsageError, "block_sigma: expected 0 to");
  EXPECT_THROWS(parse_synth_spec("synth:decode:block_sigma=nan"), UsageError, "block_sigma: expected 0 to");
  EXPECT_THROWS(parse_synth_spec("synth:decode:block_sigma=inf"), UsageError, "block_sigma: expected 0 to");
  EXPECT_THROWS(parse_synth_spec("synth:decode-grouped:experts=60"), UsageError, "a multiple of 8, found 60");
  EXPECT_THROWS(parse_synth_spec("synth:decode-grouped:experts=8,top_k=5"), UsageError,
                "top_k of at most the 4 experts in 4 of 8 groups, found 5");
  EXPECT_THROWS(ferry::synthesise({.experts = 0}), UsageError, "experts: expected 1 to");
}

}  // namespace
