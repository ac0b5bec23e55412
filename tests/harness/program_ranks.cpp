#include "harness/program_ranks.hpp"

#include <iostream>

#include "base/text.hpp"

namespace ferry::contract {
namespace {

constexpr int kMost = 8;

class Listener : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& test) override {
    if (rank_ >= 0 && &test != program_ranks().test()) GTEST_SKIP() << "the ranks do not play it";
  }

  void OnTestPartResult(const testing::TestPartResult& part) override {
    if (rank_ >= 0 && part.failed()) std::cerr << str("rank ", rank_, ": ", part) << std::flush;
  }

  void OnTestIterationEnd(const testing::UnitTest&, int iteration) override {
    if (iteration + 1 != testing::GTEST_FLAG(repeat)) return;
    const std::string failed = program_ranks().close();
    if (!failed.empty()) ADD_FAILURE() << "ended badly:" << failed;
  }

  // In a rank's process: what goes to the terminal and to files is the business of that of the tests.
  void become(int rank) {
    rank_ = rank;
    testing::TestEventListeners& all = testing::UnitTest::GetInstance()->listeners();
    delete all.Release(all.default_result_printer());
    delete all.Release(all.default_xml_generator());
  }

 private:
  int rank_ = -1;
};

}  // namespace

// Never taken down: at the end of the program the ranks have ended.
PersistentRanks& program_ranks() {
  static auto* const ranks = [] {
    auto* const listener = new Listener;
    testing::UnitTest::GetInstance()->listeners().Append(listener);
    return new PersistentRanks(kMost, [listener](int rank) { listener->become(rank); });
  }();
  return *ranks;
}

}  // namespace ferry::contract
