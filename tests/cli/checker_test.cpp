// The checks of `ferry run` must be able to fail: each test damages one number of a correct result, which the
// check must find.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/group.hpp"
#include "tools/ferry/run/expected.hpp"
#include "tools/ferry/run/report.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/shared_results.hpp"

namespace ferry::app {
namespace {

const Topology kOneNode = Topology::blocks(2, 1);

RunOptions small_options(const std::string& layout, const std::string& format) {
  RunOptions options;
  options.ranks = 2;
  options.trace = "synth:decode:experts=8,top_k=3,tokens=64,layers=1";
  options.steps = 1;
  options.tokens = 6;
  options.hidden = 128;
  options.inner = 8;
  options.layout = layout;
  options.format = format;
  options.alignment = layout == "rank_major" ? 1 : 4;
  return options;
}

// Dispatches step 0 and passes rank 1's result to `look`.
void with_received(const RunSpec& spec, const std::function<void(const DispatchResult&)>& look) {
  Group::threads(spec.options.ranks).run([&](const Rank& rank) {
    Exchange exchange(rank, spec.config);
    const std::vector<std::byte> tokens = make_tokens(spec, 0, rank.index());
    const Routes routes = make_routes(spec, 0, rank.index());
    const DispatchResult received = exchange.dispatch(Tokens::rows(tokens.data(), spec.tokens(), spec.type),
                                                      routes.ids.data(), routes.weights.data());
    if (rank.index() == 1) look(received);
  });
}

CheckCounter checked(const RunSpec& spec, const DispatchResult& received) {
  CheckCounter counter;
  dispatch_check(spec, 0).run(1, received, counter, token_parts(spec, 0));
  return counter;
}

// The row to damage: the last one that is not padding.
std::int64_t some_row(const DispatchResult& received) {
  std::int64_t row = *received.total - 1;
  while (received.source[row].rank < 0) --row;
  return row;
}

template <class T>
T& writable(const T* values, std::int64_t index) {
  return const_cast<T*>(values)[index];
}

class DispatchRows : public testing::TestWithParam<std::pair<const char*, const char*>> {
 protected:
  // The result must pass before `damage` and fail after it, with `word` in the message.
  void expect_found(const std::function<void(const DispatchResult&)>& damage, const char* word) const {
    const RunSpec spec = make_run_spec(small_options(GetParam().first, GetParam().second));
    with_received(spec, [&](const DispatchResult& received) {
      const CheckCounter before = checked(spec, received);
      EXPECT_EQ(before.wrong, 0) << before.first_failure.data();
      EXPECT_GT(before.compared, 0);
      damage(received);
      const CheckCounter after = checked(spec, received);
      EXPECT_EQ(after.wrong, 1);
      EXPECT_NE(std::string(after.first_failure.data()).find(word), std::string::npos)
          << after.first_failure.data();
    });
  }
};

TEST_P(DispatchRows, FindsOneWrongBitOfAValue) {
  expect_found(
      [](const DispatchResult& received) {
        auto* bytes = static_cast<unsigned char*>(received.data);
        bytes[some_row(received) * received.parts[0].row_bytes + 77] ^= 1;
      },
      "a value differs");
}

TEST_P(DispatchRows, FindsAWrongScale) {
  if (std::string(GetParam().second).find("fp8") == std::string::npos) GTEST_SKIP() << "no scales";
  expect_found(
      [](const DispatchResult& received) {
        const ReceivedPart& part = received.parts[1];  // one block: one element a row
        static_cast<unsigned char*>(part.data)[some_row(received) * part.row_bytes] ^= 1;
      },
      "a scale differs");
}

TEST_P(DispatchRows, FindsAWrongSource) {
  expect_found(
      [](const DispatchResult& received) { writable(received.source, some_row(received)).token ^= 1; },
      "the source");
}

TEST_P(DispatchRows, FindsAWrongWeight) {
  expect_found(
      [](const DispatchResult& received) {
        const bool slots = received.local_ids != nullptr;
        float& weight = writable(received.weight, slots ? some_row(received) * 3 : some_row(received));
        weight = std::nextafter(weight, 2.0F);
      },
      "weight differs");
}

TEST_P(DispatchRows, FindsAWrongCount) {
  expect_found([](const DispatchResult& received) { ++writable(received.counts, received.groups - 1); },
               "counts[");
}

TEST_P(DispatchRows, FindsAWrongOffset) {
  expect_found([](const DispatchResult& received) { ++writable(received.row_offsets, 1); }, "row_offsets[1]");
}

TEST_P(DispatchRows, FindsAWrongLocalExpert) {
  if (std::string(GetParam().first) != "rank_major") GTEST_SKIP() << "no local ids";
  expect_found(
      [](const DispatchResult& received) { writable(received.local_ids, some_row(received) * 3 + 1) ^= 1; },
      "a local expert differs");
}

INSTANTIATE_TEST_SUITE_P(Layouts, DispatchRows,
                         testing::Values(std::pair{"expert_major", "bf16"},
                                         std::pair{"expert_padded", "fp32"}, std::pair{"rank_major", "fp16"},
                                         std::pair{"expert_major", "fp8"},
                                         std::pair{"expert_major", "fp8-columns"}));

class CombineProducts : public testing::TestWithParam<const char*> {
 protected:
  CombineProducts() {
    RunOptions options = small_options("expert_major", "bf16");
    options.reduction = GetParam();
    spec_ = make_run_spec(options);
    routes_ = make_routes(spec_, 0, 0);
    x_ = expected_values(spec_, 0, 0);
  }

  RunSpec spec_;
  Routes routes_;
  std::vector<float> x_;
};

TEST_P(CombineProducts, FindsOneWrongBit) {
  const std::vector<std::byte> expected = expected_products(spec_, kOneNode, routes_, x_);
  std::vector<std::byte> found = expected;
  CheckCounter right;
  check_rows(spec_, 0, 0, expected, found, right);
  EXPECT_EQ(right.wrong, 0);
  EXPECT_EQ(right.compared, static_cast<std::int64_t>(expected.size() / 2));

  found[found.size() - 5] ^= std::byte{1};
  CheckCounter wrong;
  check_rows(spec_, 0, 0, expected, found, wrong);
  EXPECT_EQ(wrong.wrong, 1);
  EXPECT_EQ(wrong.compared, right.compared);
  EXPECT_NE(std::string(wrong.first_failure.data()).find("column 125"), std::string::npos)
      << wrong.first_failure.data();
}

TEST_P(CombineProducts, RightSumsDependOnEveryRoute) {
  const std::vector<std::byte> expected = expected_products(spec_, kOneNode, routes_, x_);
  Routes other = routes_;
  other.ids[7] = (other.ids[7] + 1) % 8;
  EXPECT_NE(expected_products(spec_, kOneNode, other, x_), expected);
}

INSTANTIATE_TEST_SUITE_P(Reductions, CombineProducts, testing::Values("partial", "exact", "unreduced"));

class DenseCheck : public testing::Test {
 protected:
  DenseCheck() : spec_(options()), routes_(make_routes(spec_, 0, 0)) {
    dense_ = dense_swiglu(spec_, routes_, expected_values(spec_, 0, 0));
  }

  static RunSpec options() { return make_run_spec(small_options("expert_major", "fp32")); }

  CheckCounter check(const std::vector<float>& found) const {
    CheckCounter counter;
    check_dense(spec_, 0, 0, routes_, dense_, std::as_bytes(std::span(found)), counter);
    return counter;
  }

  RunSpec spec_;
  Routes routes_;
  std::vector<float> dense_;
};

TEST_F(DenseCheck, AllowsWhatIsAllowed) {
  EXPECT_EQ(check(dense_).max_error, 0);
  std::vector<float> near = dense_;
  for (std::size_t c = 0; c < 128; ++c) near[c] *= 1.019F;
  const CheckCounter counter = check(near);
  EXPECT_EQ(counter.wrong, 0);
  EXPECT_NEAR(counter.max_error, 0.019, 1e-4);
}

TEST_F(DenseCheck, FindsATokenThatIsOff) {
  std::vector<float> far = dense_;
  for (std::size_t c = 128; c < 256; ++c) far[c] *= 1.021F;
  const CheckCounter counter = check(far);
  EXPECT_EQ(counter.wrong, 1);
  EXPECT_EQ(counter.compared, spec_.tokens());
  EXPECT_NE(std::string(counter.first_failure.data()).find("token 1"), std::string::npos);
}

TEST_F(DenseCheck, FindsNaN) {
  std::vector<float> found = dense_;
  found[300] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(check(found).wrong, 1);
}

TEST_F(DenseCheck, TokensWithoutExpertsAreZero) {
  std::fill(dense_.begin(), dense_.begin() + 128, 0.0F);
  std::vector<float> found = dense_;
  EXPECT_EQ(check(found).wrong, 0);
  found[3] = 1e-30F;
  EXPECT_EQ(check(found).wrong, 1);
}

TEST(ReportOfChecks, SaysWhatFailedAndWhere) {
  const RunSpec spec = make_run_spec(small_options("expert_major", "bf16"));
  const SharedResults results(2, 1, 8);
  for (int rank = 0; rank < 2; ++rank) {
    for (CheckCounter RankResults::* counter :
         {&RankResults::dispatch, &RankResults::combine, &RankResults::dense, &RankResults::repeated}) {
      (results.rank(rank).*counter).pass(10);
    }
  }
  for (const report::Check& check : make_report(spec, kOneNode, results).checks)
    EXPECT_TRUE(check.passed) << check.name;

  results.rank(1).combine.fail(2, "step 0, rank 1, row 3, column 4");
  results.rank(0).dispatch_wire_bytes = 16;  // more than any plan says
  const std::vector<report::Check> checks = make_report(spec, kOneNode, results).checks;
  EXPECT_TRUE(checks[0].passed);
  EXPECT_FALSE(checks[1].passed);
  EXPECT_EQ(checks[1].compared, 22);
  EXPECT_EQ(checks[1].wrong, 2);
  EXPECT_NE(checks[1].detail.find("row 3, column 4"), std::string::npos);
  EXPECT_FALSE(checks[4].passed);
}

TEST(ReportOfChecks, NothingComparedIsNotPassed) {
  const RunSpec spec = make_run_spec(small_options("expert_major", "bf16"));
  const std::vector<report::Check> checks = make_report(spec, kOneNode, SharedResults(2, 1, 8)).checks;
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(checks[static_cast<std::size_t>(i)].passed);
}

}  // namespace
}  // namespace ferry::app
