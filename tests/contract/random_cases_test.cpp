// Random configurations and calls, compared with the oracle.
//
//   FERRY_CASES  number of cases (500); every run draws others
//   FERRY_RANKS  skips cases with more ranks
//   FERRY_SEED   repeats a run
//   FERRY_CASE   runs only the case with this number
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "harness/random.hpp"

namespace ferry::contract {
namespace {

// Counts how often each value of a property occurred.
class Coverage {
 public:
  void add(const TestCase& c) {
    ++total_;
    ++ranks_[str("R = ", c.ranks)];
    ++layouts_[to_string(c.config.layout)];
    const std::string format = c.own_format ? "own" : to_string(c.config.format);
    ++formats_[format.substr(0, format.find(':'))];
    ++kinds_[format.substr(0, format.find_first_of(":-"))];
    ++reductions_[to_string(c.reduction)];
    const std::int64_t slots = std::int64_t{c.config.top_k} * (c.full ? c.config.max_tokens : 0);
    many_routes_ += slots >= 1024;
    wide_ += c.config.hidden >= 2048;
  }

  int total() const { return total_; }

  void print() const {
    std::cout << total_ << " cases: " << many_routes_ << " with N*K >= 1024, " << wide_
              << " with H >= 2048\n";
    for (const auto* group : {&ranks_, &layouts_, &formats_, &reductions_}) {
      for (const auto& [name, count] : *group) std::cout << "  " << name << ": " << count;
      std::cout << "\n";
    }
    std::cout << std::flush;
  }

  void require_coverage() const {
    EXPECT_GE(many_routes_, 200);
    EXPECT_GE(wide_, 100);
    EXPECT_EQ(ranks_.size(), 5u);
    EXPECT_EQ(layouts_.size(), 4u);
    EXPECT_EQ(kinds_.size(), 9u);
    for (const auto* group : {&ranks_, &layouts_, &kinds_}) {
      for (const auto& [name, count] : *group) EXPECT_GE(count, 50) << name;
    }
  }

 private:
  int total_ = 0, many_routes_ = 0, wide_ = 0;
  std::map<std::string, int> ranks_, layouts_, formats_, kinds_, reductions_;
};

CaseSize size_of_case(int number) {
  if (number % 8 == 3) return CaseSize::many_routes;
  if (number % 16 == 5) return CaseSize::wide;
  return CaseSize::small;
}

// One case in ten has processes.
Setup setup_of_case(int number) {
  if (number % 10 == 7) return {BackendKind::cpu, RankKind::processes};
  return {BackendKind::cpu, RankKind::threads};
}

// Calls run(number, case) for each case.
template <class Run>
void run_cases(Run run) {
  const int cases = number_from_environment("FERRY_CASES", 500),
            only = number_from_environment("FERRY_CASE", -1),
            most_ranks = number_from_environment("FERRY_RANKS", 0);
  Coverage coverage;
  for (int number = std::max(only, 0); only >= 0 ? number == only : coverage.total() < cases; ++number) {
    TestCase c = draw_case(seed_of(static_cast<std::uint64_t>(number)), size_of_case(number));
    if (most_ranks > 0 && c.ranks > most_ranks && only < 0) continue;
    if (Random random(c.seed); number % 5 == 2) give_replicas(random, c);
    ASSERT_TRUE(run(number, c)) << "case " << number;
    coverage.add(c);
  }
  coverage.print();
  if (cases >= 2000 && only < 0 && most_ranks == 0) coverage.require_coverage();
}

TEST(RandomCases, MatchTheOracle) {
  run_cases([](int number, const TestCase& c) { return run_sequences(setup_of_case(number), {c}); });
}

// Processes first: once this process has started the driver, it can no longer fork ranks.
class RandomDeviceCases : public testing::TestWithParam<Setup> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RandomDeviceCases);
INSTANTIATE_TEST_SUITE_P(CudaProcesses, RandomDeviceCases,
                         testing::ValuesIn(device_setups(RankKind::processes)));
INSTANTIATE_TEST_SUITE_P(CudaThreads, RandomDeviceCases, testing::ValuesIn(device_setups(RankKind::threads)));

TEST_P(RandomDeviceCases, MatchTheOracle) {
  if (const std::string reason = skip_reason(GetParam()); !reason.empty()) GTEST_SKIP() << reason;
  // A group runs several cases: each of its processes starts the driver, which takes longer than a case.
  constexpr std::size_t kBatchCases = 25;
  struct Batch {
    std::vector<TestCase> cases;
    std::string numbers;
  };
  std::map<int, Batch> by_ranks;
  const auto run_batch = [](Batch& batch) {
    const bool passed = batch.cases.empty() || run_sequences(GetParam(), batch.cases);
    EXPECT_TRUE(passed) << "one of the cases" << batch.numbers;
    batch = {};
    return passed;
  };
  run_cases([&](int number, const TestCase& c) {
    Batch& batch = by_ranks[c.ranks];
    batch.cases.push_back(c);
    batch.numbers += str(" ", number);
    return batch.cases.size() < kBatchCases || run_batch(batch);
  });
  for (auto& [ranks, batch] : by_ranks) {
    if (HasFailure()) break;
    run_batch(batch);
  }
}

}  // namespace
}  // namespace ferry::contract
