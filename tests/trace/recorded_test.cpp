#include "trace/trace.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "ferry/error.hpp"
#include "trace/files.hpp"

namespace {

using namespace trace_test;
using ferry::Trace;
using ferry::UsageError;

std::string ids_file(const std::string& shape, const std::vector<std::int32_t>& ids) {
  return npy(header("<i4", shape), raw(ids));
}

std::string weights_file(const std::string& shape, const std::vector<float>& weights) {
  return npy(header("<f4", shape), raw(weights));
}

Trace open(const std::string& path, int experts = 0) {
  return ferry::open_trace(path, {.experts = experts});
}

TEST(Recorded, ReadsIdsWeightsAndLengths) {
  const TempFolder folder;
  folder.write("model/a.ids.npy", ids_file("(2, 3, 2)", {0, 1, 2, 3, 4, 5, 5, 4, 3, -1, 1, 0}));
  folder.write("model/a.weights.npy",
               npy(header("<f2", "(2, 3, 2)"), raw(std::vector<std::uint16_t>(12, 0x3400))));
  folder.write("model/a.seqlens.npy", npy(header("<i8", "(2,)"), raw<std::int64_t>({1, 2})));
  const Trace trace = ferry::open_trace("model/a", {.directory = folder / "", .experts = 6});
  EXPECT_EQ(trace.name, "model/a");
  EXPECT_EQ(trace.layers, 2);
  EXPECT_EQ(trace.tokens, 3);
  EXPECT_EQ(trace.top_k, 2);
  EXPECT_EQ(trace.experts, 6);
  EXPECT_EQ(trace.ids, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 5, 4, 3, -1, 1, 0}));
  EXPECT_EQ(trace.weights, std::vector<float>(12, 0.25f));
  EXPECT_EQ(trace.sequence_lengths, (std::vector<std::int64_t>{1, 2}));
  EXPECT_NE(trace.source.find("weights recorded"), std::string::npos) << trace.source;
  EXPECT_NE(trace.source.find("6 experts (as given)"), std::string::npos) << trace.source;
  EXPECT_EQ(trace.source.find("model"), std::string::npos)
      << trace.source << ": published results must not name a folder";
  EXPECT_EQ(trace.layer_ids(1)[3], -1);
  EXPECT_EQ(trace.layer_weights(1).size(), 6u);
  EXPECT_THROWS(trace.layer_ids(2), UsageError, "layer 2 of 2");
  EXPECT_THROWS(trace.layer_weights(-1), UsageError, "layer -1 of 2");
}

TEST(Recorded, FindsTheFolderByItsEnvironmentVariable) {
  const TempFolder folder;
  folder.write("model/a.ids.npy", ids_file("(1, 1, 2)", {0, 1}));
  folder.write("model/b.exact_top8.npy", ids_file("(1, 1, 2)", {2, 3}));
  const char* before = std::getenv("FERRY_TRACES");
  const std::string kept = before ? before : "";
  setenv("FERRY_TRACES", (folder / "").c_str(), 1);
  EXPECT_EQ(ferry::open_trace("model/a").ids[1], 1);
  EXPECT_EQ(ferry::open_trace("model/b").ids[1], 3);
  EXPECT_THROWS(ferry::open_trace("model/c"), UsageError, "c.exact_top8.npy");
  unsetenv("FERRY_TRACES");
  EXPECT_THROWS(ferry::open_trace("model/a"), UsageError, "FERRY_TRACES is not set");
  if (before) setenv("FERRY_TRACES", kept.c_str(), 1);
}

TEST(Recorded, UsesUniformWeightsWhereNoneWereRecorded) {
  const TempFolder folder;
  const Trace trace = open(folder.write("a.ids.npy", ids_file("(1, 2, 4)", {0, 1, 2, 3, 4, 5, 6, 7})));
  EXPECT_TRUE(trace.weights.empty());
  EXPECT_TRUE(trace.layer_weights(0).empty());
  EXPECT_EQ(partition(trace, {.ranks = 2, .tokens_per_rank = 3}).weights, std::vector<float>(12, 0.25f));
  save_trace(trace, folder / "b");
  EXPECT_EQ(open(folder / "b.ids.npy").weights, std::vector<float>(8, 0.25f));
  EXPECT_TRUE(trace.sequence_lengths.empty());
  EXPECT_NE(trace.source.find("weights not recorded, 1/4 each"), std::string::npos) << trace.source;
}

TEST(Recorded, ReadsTwoDimensionsAsOneLayer) {
  const TempFolder folder;
  folder.write("a.weights.npy", weights_file("(2, 2)", {0.5f, 0.25f, 1.0f, 0.0f}));
  const Trace trace = open(folder.write("a.ids.npy", ids_file("(2, 2)", {0, 1, 2, 0})));
  EXPECT_EQ(trace.layers, 1);
  EXPECT_EQ(trace.tokens, 2);
  EXPECT_EQ(trace.weights[1], 0.25f);
}

TEST(Recorded, DerivesTheNumberOfExperts) {
  const TempFolder folder;
  const std::string ids = ids_file("(1, 1, 2)", {0, 17});
  EXPECT_EQ(open(folder.write("some/a.ids.npy", ids)).experts, 32);
  EXPECT_EQ(open(folder.write("some/b.ids.npy", ids_file("(1, 1, 2)", {-1, -1}))).experts, 1);
  EXPECT_EQ(open(folder.write("some/c.ids.npy", ids_file("(1, 1, 2)", {3, 4}))).experts, 8);
  EXPECT_EQ(open(folder.write("some/d.ids.npy", ids_file("(1, 1, 2)", {3, 3}))).experts, 4);
  const Trace known = open(folder.write("olmoe_1b_7b/a.ids.npy", ids));
  EXPECT_EQ(known.experts, 64);
  EXPECT_NE(known.source.find("64 experts (known from the folder)"), std::string::npos) << known.source;
  EXPECT_EQ(open(folder / "olmoe_1b_7b/a.ids.npy", 18).experts, 18);
  EXPECT_THROWS(open(folder / "some/a.ids.npy", -1), UsageError, "found -1");
}

TEST(Recorded, RefusesIdsOutsideTheExperts) {
  const TempFolder folder;
  std::vector<std::int32_t> ids(2 * 3 * 2, 0);
  ids[1 * 6 + 2 * 2 + 1] = 8;
  const std::string path = folder.write("a.ids.npy", ids_file("(2, 3, 2)", ids));
  EXPECT_EQ(open(path, 9).ids[11], 8);
  EXPECT_THROWS(open(path, 8), UsageError,
                "a.ids.npy: expected ids from -1 to 7 (8 experts), found 8 at layer 1, token 2, slot 1");
  ids[3] = -2;
  folder.write("a.ids.npy", ids_file("(2, 3, 2)", ids));
  EXPECT_THROWS(open(path, 9), UsageError, "found -2 at layer 0, token 1, slot 1");
  folder.write("wide.ids.npy", npy(header("<i8", "(1, 1, 1)"), raw<std::int64_t>({1ll << 40})));
  EXPECT_THROWS(open(folder / "wide.ids.npy"), UsageError, "found 1099511627776");
  EXPECT_THROWS(open(folder / "wide.ids.npy", 8), UsageError,
                "found 1099511627776 at layer 0, token 0, slot 0");
  folder.write("huge.ids.npy", npy(header("<u8", "(1, 1, 1)"), raw<std::uint64_t>({~0ull})));
  EXPECT_THROWS(open(folder / "huge.ids.npy", 8), UsageError, "found 18446744073709551615");
}

TEST(Recorded, RefusesShapesThatAreNotATrace) {
  const TempFolder folder;
  EXPECT_THROWS(open(folder.write("a.npy", ids_file("(2,)", {0, 1}))), UsageError, "found [2]");
  EXPECT_THROWS(open(folder.write("a.npy", ids_file("(1, 1, 1, 1)", {0}))), UsageError, "found [1, 1, 1, 1]");
  EXPECT_THROWS(open(folder.write("a.npy", ids_file("(1, 0, 6)", {}))), UsageError, "found shape [1, 0, 6]");
  EXPECT_THROWS(open(folder.write("a.npy", ids_file("(0, 4, 6)", {}))), UsageError, "found shape [0, 4, 6]");
  EXPECT_THROWS(open(folder.write("a.npy", ids_file("(1, 1, 0)", {}))), UsageError, "found shape [1, 1, 0]");
  EXPECT_THROWS(open(folder.write("a.npy", ids_file("(1, 33)", std::vector<std::int32_t>(33)))), UsageError,
                "top_k 1 to 32, found shape [1, 33]");
  EXPECT_THROWS(open(folder.write("a.npy", weights_file("(1, 1)", {0.0f}))), UsageError,
                "an integer type, found <f4");
}

TEST(Recorded, RefusesWeightsAndLengthsThatDoNotMatchTheIds) {
  const TempFolder folder;
  const std::string path = folder.write("a.ids.npy", ids_file("(1, 2, 2)", {0, 1, 2, 3}));
  folder.write("a.weights.npy", weights_file("(2, 2)", {0, 0, 0, 0}));
  EXPECT_THROWS(open(path), UsageError,
                "a.weights.npy: expected the shape of the ids, [1, 2, 2], found [2, 2]");
  folder.write("a.weights.npy", ids_file("(1, 2, 2)", {0, 0, 0, 0}));
  EXPECT_THROWS(open(path), UsageError, "expected weights of type <f2 or <f4, found <i4");
  folder.write("a.weights.npy", weights_file("(1, 2, 2)", {0, 0, 0, 0}));
  folder.write("a.seqlens.npy", ids_file("(2,)", {1, 2}));
  EXPECT_THROWS(open(path), UsageError,
                "sequence 1: expected a length from 0 to 1 (the ids have 2 tokens), found 2");
  folder.write("a.seqlens.npy", ids_file("(1,)", {1}));
  EXPECT_THROWS(open(path), UsageError, "expected lengths that sum to 2 tokens, found 1");
  folder.write("a.seqlens.npy", ids_file("(2,)", {3, -1}));
  EXPECT_THROWS(open(path), UsageError, "found 3");
  folder.write("a.seqlens.npy", ids_file("(1, 1)", {2}));
  EXPECT_THROWS(open(path), UsageError,
                "expected integers of shape [sequences], found type <i4, shape [1, 1]");
  folder.write("a.seqlens.npy", weights_file("(1,)", {2}));
  EXPECT_THROWS(open(path), UsageError, "found type <f4");
}

TEST(Recorded, ReadsSavedTraces) {
  const std::uint64_t s = seed();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(s));
  const TempFolder folder;
  const Trace made = ferry::synthesise({.experts = 64, .top_k = 6, .tokens = 50, .layers = 3, .seed = s});
  ferry::save_trace(made, folder / "made");
  const Trace read = open(folder / "made.ids.npy", 64);
  EXPECT_EQ(read.ids, made.ids);
  EXPECT_EQ(read.weights, made.weights);
  EXPECT_EQ(read.sequence_lengths, made.sequence_lengths);
  EXPECT_EQ(read.layers, 3);
  EXPECT_EQ(read.tokens, 50);
  EXPECT_EQ(read.top_k, 6);
  EXPECT_THROWS(ferry::save_trace(made, "/nowhere/made"), ferry::SystemError, "/nowhere/made.ids.npy");
}

}  // namespace
