#include "harness/program_ranks.hpp"

#include <iostream>

#include "base/text.hpp"

namespace ferry::contract {
namespace {

constexpr int kMaxRanks = 8;

class Listener : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& test) override {
    if (rank_ >= 0 && &test != program_ranks().current_test()) GTEST_SKIP() << "does not run on this rank";
  }

  void OnTestPartResult(const testing::TestPartResult& part) override {
    if (rank_ >= 0 && part.failed()) std::cerr << str("rank ", rank_, ": ", part) << std::flush;
  }

  void OnTestIterationEnd(const testing::UnitTest&, int iteration) override {
    if (iteration + 1 != testing::GTEST_FLAG(repeat)) return;
    const std::string failed = program_ranks().shut_down();
    if (!failed.empty()) ADD_FAILURE() << "failed:" << failed;
  }

  // Called in a rank's process: only the test process prints results and writes files.
  void act_as_rank(int rank) {
    rank_ = rank;
    testing::TestEventListeners& all = testing::UnitTest::GetInstance()->listeners();
    delete all.Release(all.default_result_printer());
    delete all.Release(all.default_xml_generator());
  }

 private:
  int rank_ = -1;
};

}  // namespace

// Never destroyed: the ranks have exited before the program ends.
PersistentRanks& program_ranks() {
  static auto* const ranks = [] {
    auto* const listener = new Listener;
    testing::UnitTest::GetInstance()->listeners().Append(listener);
    return new PersistentRanks(kMaxRanks, [listener](int rank) { listener->act_as_rank(rank); });
  }();
  return *ranks;
}

}  // namespace ferry::contract
