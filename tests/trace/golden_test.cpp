// Compares statistics of recorded traces with published figures. FERRY_TRACES names the folder of the traces;
// without it these tests are skipped, and under CI=true they fail.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "ferry/trace.hpp"

namespace {

using ferry::LoadStatistics;
using ferry::Trace;

class RecordedTraces : public testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("FERRY_TRACES");
    if (folder && *folder) {
      folder_ = folder;
      return;
    }
    const char* ci = std::getenv("CI");
    if (ci && std::string(ci) == "true") FAIL() << "CI needs the recorded traces: FERRY_TRACES is not set";
    GTEST_SKIP() << "FERRY_TRACES, the folder of recorded traces, is not set";
  }

  LoadStatistics counted(const std::string& model, const std::string& domain) const {
    std::ifstream in(folder_ + "/olmoe_1b_7b/expert_counts.json");
    const auto json = nlohmann::json::parse(in);
    std::vector<LoadStatistics> layers;
    for (const char* position : {"position_0", "position_1", "position_2"}) {
      layers.push_back(
          ferry::load_statistics(json.at(model).at(domain).at(position).get<std::vector<std::int64_t>>()));
    }
    return ferry::median(layers);
  }

  std::string folder_;
};

// Published figures have two or three digits. The tolerance is half a unit of the last one.
struct Published {
  double max, p99, p90, p50, p10, min, sigma_ln, gini;
};

void expect_figures(const LoadStatistics& found, const Published& published) {
  EXPECT_NEAR(found.max, published.max, 0.05);
  EXPECT_NEAR(found.p99, published.p99, 0.05);
  EXPECT_NEAR(found.p90, published.p90, 0.005);
  EXPECT_NEAR(found.p50, published.p50, 0.005);
  EXPECT_NEAR(found.p10, published.p10, 0.005);
  EXPECT_NEAR(found.min, published.min, 0.005);
  EXPECT_NEAR(found.sigma_ln, published.sigma_ln, 0.005);
  EXPECT_NEAR(found.gini, published.gini, 0.005);
}

TEST_F(RecordedTraces, OlmoeLoads) {
  expect_figures(counted("olmoe", "c4"), {2.7, 2.1, 1.44, 0.97, 0.58, 0.20, 0.41, 0.21});
  expect_figures(counted("olmoe", "github"), {5.0, 4.5, 2.50, 0.64, 0.13, 0.01, 1.22, 0.58});
}

TEST_F(RecordedTraces, MixtralLoads) {
  const auto expect = [&](const char* domain, double max, double min, double sigma_ln, double gini) {
    const LoadStatistics found = counted("mixtral_8x7b", domain);
    EXPECT_NEAR(found.max, max, 0.005);
    EXPECT_NEAR(found.min, min, 0.005);
    EXPECT_NEAR(found.sigma_ln, sigma_ln, 0.005);
    EXPECT_NEAR(found.gini, gini, 0.005);
  };
  expect("c4", 1.12, 0.82, 0.10, 0.05);
  expect("github", 1.30, 0.84, 0.12, 0.07);
}

Trace open(const std::string& folder, const std::string& name) {
  return ferry::open_trace(name, {.directory = folder});
}

void expect_distinct_ids(const Trace& trace) {
  const auto k = static_cast<std::size_t>(trace.top_k);
  for (std::size_t row = 0; row < trace.ids.size(); row += k) {
    for (std::size_t a = 0; a < k; ++a) {
      for (std::size_t b = 0; b < a; ++b)
        ASSERT_NE(trace.ids[row + a], trace.ids[row + b]) << "row " << row / k;
    }
  }
}

TEST_F(RecordedTraces, OlmoeTopEight) {
  const std::pair<const char*, std::int64_t> domains[] = {
      {"arxiv", 2504}, {"book", 4187}, {"github", 3482}, {"wikipedia", 5377}};
  for (const auto& [domain, tokens] : domains) {
    const Trace trace = open(folder_, std::string("olmoe_1b_7b/") + domain);
    EXPECT_EQ(trace.layers, 3);
    EXPECT_EQ(trace.tokens, tokens);
    EXPECT_EQ(trace.top_k, 8);
    EXPECT_EQ(trace.experts, 64);
    EXPECT_TRUE(trace.weights.empty());  // not recorded
    expect_distinct_ids(trace);
  }
}

TEST_F(RecordedTraces, DeepSeekLite) {
  const std::tuple<const char*, std::int64_t, std::size_t> domains[] = {{"intent", 8222, 127},
                                                                        {"summary", 8479, 13}};
  for (const auto& [domain, tokens, sequences] : domains) {
    SCOPED_TRACE(domain);
    const Trace trace = open(folder_, std::string("deepseek_v2_lite/") + domain);
    EXPECT_EQ(trace.layers, 3);
    EXPECT_EQ(trace.tokens, tokens);
    EXPECT_EQ(trace.top_k, 6);
    EXPECT_EQ(trace.experts, 64);
    EXPECT_EQ(trace.sequence_lengths.size(), sequences);
    expect_distinct_ids(trace);
    double sum = 0;
    for (const float weight : trace.weights) {
      ASSERT_GT(weight, 0.0f);
      sum += static_cast<double>(weight);
    }
    const double mean = sum / static_cast<double>(trace.layers * trace.tokens);
    EXPECT_GT(mean, 0.29);  // the router does not renormalise
    EXPECT_LT(mean, 0.40);
  }
}

// The published 4.55 covers more domains than these two, hence the tolerance of 0.1.
TEST_F(RecordedTraces, DeepSeekLiteDistinctRanks) {
  const auto placement = ferry::Placement::blocks(64, 8);
  for (const char* name : {"deepseek_v2_lite/intent", "deepseek_v2_lite/summary"}) {
    const Trace trace = open(folder_, name);
    double sum = 0;
    for (int layer = 0; layer < trace.layers; ++layer) sum += ferry::distinct_ranks(trace, layer, placement);
    EXPECT_NEAR(sum / trace.layers, 4.55, 0.1) << name;
  }
}

}  // namespace
