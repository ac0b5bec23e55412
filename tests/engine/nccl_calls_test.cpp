// Calls of the backend `collective` over the engine `nccl`, in groups that bring no engine.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>

#include "backends/collective/engine_call.hpp"
#include "engine/nccl_ranks.hpp"
#include "ferry/error.hpp"
#include "group/rank_state.hpp"

namespace ferry::test {
namespace {

using collective::EngineLink;

constexpr double kDeadline = 5.0;

std::unique_ptr<EngineLink> link_of(const Rank& rank, Engine& engine,
                                    std::unique_ptr<Communicator> communicator, int lane) {
  return std::make_unique<EngineLink>(
      rank,
      collective::LaneConnection{.communicator = std::move(communicator),
                                 .lane = lane,
                                 .summary_bytes = 8,
                                 .deadline = kDeadline,
                                 .ordered = engine.transfer_thread()},
      collective::HopOptions{.relays = false, .window = 0},
      std::make_unique<collective::HostHopMemory>(std::array<std::int64_t, 4>{64, 64, 0, 0}));
}

// The lanes of one exchange.
std::vector<std::unique_ptr<EngineLink>> links_of(const Rank& rank, Engine& engine, int lanes) {
  auto communicators = engine.communicators(lanes);
  std::vector<std::unique_ptr<EngineLink>> links;
  for (int lane = 0; lane < lanes; ++lane)
    links.push_back(link_of(rank, engine, std::move(communicators[static_cast<std::size_t>(lane)]), lane));
  return links;
}

// A call in which every rank tells each its number.
void expect_numbers(EngineLink& link, const Rank& rank) {
  link.begin(Operation::metadata, {}, false);
  for (int peer = 0; peer < rank.size(); ++peer) {
    const std::int64_t told = 100 * rank.index() + peer;
    std::memcpy(link.summary_to(peer), &told, sizeof told);
  }
  link.post(false);
  link.wait();
  for (int peer = 0; peer < rank.size(); ++peer) {
    std::int64_t told = 0;
    std::memcpy(&told, link.summary_from(peer), sizeof told);
    EXPECT_EQ(told, 100 * peer + rank.index());
  }
}

// With and without call headers in shared memory.
class NcclCalls : public testing::TestWithParam<bool> {};

TEST_P(NcclCalls, GroupsNeedNotBringAnEngine) {
  setenv("FERRY_NCCL_LIBRARY", FERRY_FAKE_NCCL, 1);
  Group::threads(3).run([&](Rank rank) {
    ASSERT_EQ(rank.state().engine(), nullptr);
    Engine& engine = nccl_engine_of(rank.state(), kDeadline, device_of(rank.index(), rank, GetParam()));
    const auto lanes = links_of(rank, engine, 2);
    for (const int lane : {0, 1, 1, 0}) expect_numbers(*lanes[static_cast<std::size_t>(lane)], rank);
  });
}

// Ranks that call their lanes in another order meet, and learn of it before the deadline.
TEST_P(NcclCalls, AnotherOrderOfLanesIsRefusedOnEveryRank) {
  setenv("FERRY_NCCL_LIBRARY", FERRY_FAKE_NCCL, 1);
  Group::threads(3).run([&](Rank rank) {
    Engine& engine = nccl_engine_of(rank.state(), kDeadline, device_of(rank.index(), rank, GetParam()));
    const auto lanes = links_of(rank, engine, 2);
    const int first = rank.index() == 1 ? 1 : 0;
    for (const int lane : {first, 1 - first}) {
      try {
        expect_numbers(*lanes[static_cast<std::size_t>(lane)], rank);
        ADD_FAILURE() << "rank " << rank.index() << ": accepted";
      } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what()).find("the same order on all ranks"), std::string::npos)
            << error.what();
      }
    }
    for (const int lane : {1, 0}) expect_numbers(*lanes[static_cast<std::size_t>(lane)], rank);
  });
}

// Also those of several exchanges.
TEST_P(NcclCalls, AnotherOrderOfExchangesIsRefusedOnEveryRank) {
  setenv("FERRY_NCCL_LIBRARY", FERRY_FAKE_NCCL, 1);
  Group::threads(3).run([&](Rank rank) {
    const auto exchange = [&] {
      return links_of(rank,
                      nccl_engine_of(rank.state(), kDeadline, device_of(rank.index(), rank, GetParam())), 1);
    };
    const auto one = exchange(), two = exchange();
    EngineLink* const links[] = {one[0].get(), two[0].get()};
    const int first = rank.index() == 1 ? 1 : 0;
    for (const int each : {first, 1 - first}) EXPECT_THROW(expect_numbers(*links[each], rank), UsageError);
    for (const int each : {1, 0}) expect_numbers(*links[each], rank);
  });
}

// A rank may still have an exchange that its peers have destroyed, or change its device.
TEST_P(NcclCalls, RanksThatHaveLostTheConnectionMakeANewOne) {
  setenv("FERRY_NCCL_LIBRARY", FERRY_FAKE_NCCL, 1);
  Group::threads(2).run([&](Rank rank) {
    const auto exchange = [&](int device) {
      return links_of(rank, nccl_engine_of(rank.state(), kDeadline, device_of(device, rank, GetParam())), 1);
    };
    auto old = exchange(rank.index());
    expect_numbers(*old[0], rank);
    if (rank.index() == 1) old.clear();
    const auto fresh = exchange(rank.index()), elsewhere = exchange(rank.index() + 10);
    for (const auto* lanes : {&fresh, &elsewhere, &fresh}) expect_numbers(*(*lanes)[0], rank);
  });
}

// Transfers of host memory that take no call of NCCL.
TEST(NcclHeaders, OfOneHostTravelInSharedMemory) {
  setenv("FERRY_NCCL_LIBRARY", FERRY_FAKE_NCCL, 1);
  for (const bool shares : {false, true}) {
    const int before = nccl_calls("sends");
    Group::threads(2).run([&](Rank rank) {
      Engine& engine = nccl_engine_of(rank.state(), kDeadline, device_of(rank.index(), rank, shares));
      const auto lanes = links_of(rank, engine, 1);
      for (int call = 0; call < 3; ++call) expect_numbers(*lanes[0], rank);
    });
    EXPECT_EQ(nccl_calls("sends") - before, shares ? 0 : 6);
  }
}

INSTANTIATE_TEST_SUITE_P(Headers, NcclCalls, testing::Bool());

}  // namespace
}  // namespace ferry::test
