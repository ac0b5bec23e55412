// Random cases: every backend against the oracle, over everything a configuration and a call can say.
//
// FERRY_CASES sets how many, FERRY_RANKS of at most how many ranks, FERRY_SEED repeats a run, FERRY_CASE
// plays one case of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

int number_from(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

// How often each value of a property has been played.
class Tally {
 public:
  void add(const Case& c) {
    ++total_;
    ++ranks_[str("R = ", c.ranks)];
    ++layouts_[to_string(c.config.layout)];
    ++formats_[to_string(c.config.format).substr(0, to_string(c.config.format).find(':'))];
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
    EXPECT_EQ(layouts_.size(), 3u);
    EXPECT_GE(formats_.size(), 5u);
    for (const auto* group : {&ranks_, &layouts_, &formats_}) {
      for (const auto& [name, count] : *group) EXPECT_GE(count, 50) << name;
    }
  }

 private:
  int total_ = 0, many_routes_ = 0, wide_ = 0;
  std::map<std::string, int> ranks_, layouts_, formats_, reductions_;
};

CaseSize size_of_case(int number) {
  if (number % 8 == 3) return CaseSize::many_routes;
  if (number % 16 == 5) return CaseSize::wide;
  return CaseSize::small;
}

// Mostly the CPU backend with threads; the reference and processes have their share.
Setup setup_of_case(int number) {
  if (number % 10 == 7) return {BackendKind::cpu, RanksAre::processes};
  if (number % 10 == 9)
    return {BackendKind::reference, number % 20 == 9 ? RanksAre::processes : RanksAre::threads};
  return {BackendKind::cpu, RanksAre::threads};
}

// Calls play(number, case) for each.
template <class Play>
void play_cases(Play play) {
  const int cases = number_from("FERRY_CASES", 2000), only = number_from("FERRY_CASE", -1),
            most_ranks = number_from("FERRY_RANKS", 0);
  Tally tally;
  for (int number = std::max(only, 0); only >= 0 ? number == only : tally.total() < cases; ++number) {
    Case c = draw_case(seed_of(static_cast<std::uint64_t>(number)), size_of_case(number));
    if (most_ranks > 0 && c.ranks > most_ranks && only < 0) continue;
    ASSERT_TRUE(play(number, c)) << "case " << number;
    tally.add(c);
  }
  tally.print();
  if (cases >= 2000 && only < 0 && most_ranks == 0) tally.require_coverage();
}

TEST(RandomCases, AgreeWithTheReference) {
  play_cases([](int number, const Case& c) { return play_sequences(setup_of_case(number), {c}); });
}

// Processes first: ranks cannot be forked any more once this process has started the driver.
class RandomCasesOnDevices : public testing::TestWithParam<Setup> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RandomCasesOnDevices);
INSTANTIATE_TEST_SUITE_P(CudaProcesses, RandomCasesOnDevices,
                         testing::ValuesIn(device_setups(RanksAre::processes)));
INSTANTIATE_TEST_SUITE_P(CudaThreads, RandomCasesOnDevices,
                         testing::ValuesIn(device_setups(RanksAre::threads)));

TEST_P(RandomCasesOnDevices, AgreeWithTheReference) {
  if (const std::string reason = why_not(GetParam()); !reason.empty()) GTEST_SKIP() << reason;
  // A group plays several: each of its processes starts the driver, which takes longer than a case.
  constexpr std::size_t kTogether = 25;
  struct Together {
    std::vector<Case> cases;
    std::string numbers;
  };
  std::map<int, Together> by_ranks;
  const auto play = [](Together& group) {
    const bool good = group.cases.empty() || play_sequences(GetParam(), group.cases);
    EXPECT_TRUE(good) << "one of the cases" << group.numbers;
    group = {};
    return good;
  };
  play_cases([&](int number, const Case& c) {
    Together& group = by_ranks[c.ranks];
    group.cases.push_back(c);
    group.numbers += str(" ", number);
    return group.cases.size() < kTogether || play(group);
  });
  for (auto& [ranks, group] : by_ranks) {
    if (HasFailure()) break;
    play(group);
  }
}

}  // namespace
}  // namespace ferry::contract
