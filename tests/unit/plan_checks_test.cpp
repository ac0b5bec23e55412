// A plan's accessors refuse storage that holds no plan, whatever its bytes.
#include "plan/plan_checks.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "refusal.hpp"

namespace ferry {
namespace {

constexpr PlanShape kShape{.ranks = 2, .experts = 4, .top_k = 2, .max_tokens = 3, .capacity = 12};

class PlanStorage {
 public:
  PlanStorage() : words_(static_cast<std::size_t>(view_plan(nullptr, kShape).bytes) / 16) {
    header() = {.magic = kPlanMagic,
                .config_hash = 1,
                .placement_version = 0,
                .call = 1,
                .shape = kShape,
                .rank = 1,
                .tokens = 3,
                .total = 12,
                .dropped = 0,
                .check = 0};
    sign();
  }
  PlanHeader& header() { return *reinterpret_cast<PlanHeader*>(words_.data()); }
  void sign() { header().check = header_check(header()); }
  std::size_t bytes() const { return words_.size() * 16; }
  Plan plan(std::size_t bytes) { return Plan::over(words_.data(), bytes); }

 private:
  struct alignas(16) Word {
    char bytes[16];
  };
  std::vector<Word> words_;
};

void expect_refused(const Plan& plan, const std::string& words) {
  const std::vector<std::function<void()>> accessors = {
      [&] { plan.rank(); },           [&] { plan.tokens(); },  [&] { plan.total(); },
      [&] { plan.counts(); },         [&] { plan.sources(); }, [&] { plan.destination(0, 0); },
      [&] { plan.tokens_between(); }, [&] { plan.row(0, 0); }};
  for (const auto& accessor : accessors) {
    const std::string text = test::refusal(accessor);
    EXPECT_NE(text.find(words), std::string::npos) << text << ", expected: " << words;
  }
}

TEST(PlanChecks, AcceptAPlan) {
  PlanStorage storage;
  const Plan plan = storage.plan(storage.bytes());
  EXPECT_EQ(plan.total(), 12);
  EXPECT_EQ(plan.sources().size(), 12u);
  EXPECT_EQ(plan.row(2, 1), 0);
}

TEST(PlanChecks, RefuseNumbersOutOfRange) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const auto change = [&](const std::string& words, const std::function<void(PlanHeader&)>& set) {
    PlanStorage storage;
    set(storage.header());
    expect_refused(storage.plan(storage.bytes()), "checksum");
    storage.sign();
    expect_refused(storage.plan(storage.bytes()), words);
  };
  for (const std::int64_t total : {std::int64_t{-1}, std::int64_t{13}, std::int64_t{1} << 62})
    change("total = ", [&](PlanHeader& header) { header.total = total; });
  for (const std::int32_t tokens : {-1, 4, std::numeric_limits<std::int32_t>::max()})
    change("tokens = ", [&](PlanHeader& header) { header.tokens = tokens; });
  change("rank = ", [](PlanHeader& header) { header.rank = 2; });
  change("ranks = ", [](PlanHeader& header) { header.shape.ranks = 0; });
  change("top_k = ", [](PlanHeader& header) { header.shape.top_k = kMaxTopK + 1; });
  change("capacity = ", [](PlanHeader& header) { header.shape.capacity = kMost + 1; });
  change("this plan takes", [](PlanHeader& header) { header.shape.capacity = kMost; });
  change("this plan takes", [](PlanHeader& header) { header.shape.max_tokens = 1 << 24; });
}

TEST(PlanChecks, RefuseStorageThatIsTooSmall) {
  PlanStorage storage;
  expect_refused(Plan(), "empty");
  expect_refused(storage.plan(storage.bytes() - 1), "this plan takes");
  expect_refused(storage.plan(sizeof(PlanHeader) - 1), "a plan takes at least");
}

TEST(PlanChecks, RefuseRoutesThatDoNotExist) {
  PlanStorage storage;
  const Plan plan = storage.plan(storage.bytes());
  for (const auto& [token, slot] : {std::pair(-1, 0), {3, 0}, {0, -1}, {0, 2}}) {
    EXPECT_THROW(plan.row(token, slot), UsageError);
    EXPECT_THROW(plan.destination(token, slot), UsageError);
  }
}

}  // namespace
}  // namespace ferry
