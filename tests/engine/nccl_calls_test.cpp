// Calls of the backend `collective` over the engine `nccl`, in groups that bring no engine.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "backends/collective/engine_link.hpp"
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
      rank, std::move(communicator), lane, 8, collective::HopOptions{.relays = false, .window = 0},
      collective::MessageMemory{.outbox = 64, .inbox = 64}, kDeadline, engine.transfer_thread());
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
  link.begin(Operation::metadata, {});
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

TEST(NcclCalls, GroupsNeedNotBringAnEngine) {
  setenv("FERRY_NCCL_LIBRARY", FERRY_FAKE_NCCL, 1);
  Group::threads(3).run([](Rank rank) {
    ASSERT_EQ(rank.state().engine(), nullptr);
    const auto engine = make_nccl_engine(rank, kDeadline, device_of(rank.index()));
    const auto lanes = links_of(rank, *engine, 2);
    for (const int lane : {0, 1, 1, 0}) expect_numbers(*lanes[static_cast<std::size_t>(lane)], rank);
  });
}

}  // namespace
}  // namespace ferry::test
