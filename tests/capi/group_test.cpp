#include "ferry/group.hpp"

#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "capi/run.hpp"

namespace ferry::capi_test {
namespace {

TEST(Groups, OfThreadsRunEveryRank) {
  ferry_group* made = nullptr;
  const std::vector<std::int32_t> pairs = {0, 0, 1, 1, 2, 2};
  ASSERT_EQ(ferry_group_threads(pairs.data(), 6, &made), FERRY_OK);
  const GroupHandle group(made, ferry_group_destroy);
  EXPECT_EQ(ferry_group_size(made), 6);
  std::atomic<int> entered{0};
  EXPECT_EQ(run(made,
                [&](ferry_rank* rank) {
                  entered += 1 << ferry_rank_index(rank);
                  EXPECT_EQ(ferry_rank_size(rank), 6);
                  std::vector<std::int32_t> node_of(6, -1);
                  auto topology = sized<ferry_topology>();
                  ASSERT_EQ(ferry_rank_topology(rank, &topology, node_of.data()), FERRY_OK);
                  EXPECT_EQ(topology.same_process, 1);
                  EXPECT_EQ(topology.nodes, 3);
                  EXPECT_EQ(node_of, pairs);
                  const int mine = 10 * ferry_rank_index(rank);
                  std::vector<int> all(6, -1);
                  ASSERT_EQ(ferry_rank_all_gather(rank, &mine, all.data(), sizeof mine), FERRY_OK);
                  EXPECT_EQ(all, (std::vector<int>{0, 10, 20, 30, 40, 50}));
                  ASSERT_EQ(ferry_rank_barrier(rank), FERRY_OK);
                  EXPECT_EQ(entered, 63);
                }),
            FERRY_OK)
      << ferry_last_error();
}

TEST(Groups, OfThreadsHaveNodesOfAnySizes) {
  const std::vector<std::int32_t> labels = {7, 3, 7, 7};
  ferry_group* made = nullptr;
  ASSERT_EQ(ferry_group_threads(labels.data(), 4, &made), FERRY_OK) << ferry_last_error();
  const GroupHandle group(made, ferry_group_destroy);
  EXPECT_EQ(run(made,
                [&](ferry_rank* rank) {
                  std::vector<std::int32_t> node_of(4, -1);
                  auto topology = sized<ferry_topology>();
                  ASSERT_EQ(ferry_rank_topology(rank, &topology, node_of.data()), FERRY_OK);
                  EXPECT_EQ(topology.nodes, 2);
                  EXPECT_EQ(ferry_rank_topology(rank, &topology, nullptr), FERRY_OK);
                  EXPECT_EQ(node_of, (std::vector<std::int32_t>{0, 1, 0, 0}));
                }),
            FERRY_OK)
      << ferry_last_error();
  ferry_group* refused = nullptr;
  EXPECT_EQ(ferry_group_processes(labels.data(), 0, &refused), FERRY_USAGE);
  EXPECT_EQ(refused, nullptr);
}

TEST(Groups, ThatStartTheirRanksCannotBeJoined) {
  const GroupHandle group = threads(2);
  ferry_rank* rank = nullptr;
  EXPECT_EQ(ferry_group_join(group.get(), &rank), FERRY_USAGE);
  EXPECT_EQ(rank, nullptr);
  EXPECT_TRUE(is_refused(ferry_group_join(group.get(), nullptr), "rank"));
  ferry_rank_leave(nullptr);
}

TEST(Groups, WithImpossibleNumbersAreRefused) {
  ferry_group* group = nullptr;
  EXPECT_EQ(ferry_group_threads(nullptr, 0, &group), FERRY_USAGE);
  EXPECT_EQ(ferry_group_processes(nullptr, -1, &group), FERRY_USAGE);
  EXPECT_EQ(group, nullptr);
  const GroupHandle one = threads(1);
  for (const double seconds : {0.0, -1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    EXPECT_EQ(ferry_group_set_deadline(one.get(), seconds), FERRY_USAGE);
  }
  EXPECT_EQ(ferry_group_set_deadline(one.get(), 2.5), FERRY_OK);
}

// When a body fails, its peers lose the rank, and ferry_group_run() returns the body's status.
TEST(Groups, TheStatusOfAFailedBodyEndsTheGroup) {
  const GroupHandle group = threads(3);
  const auto body = [](ferry_rank* rank, void*) -> ferry_status {
    if (ferry_rank_index(rank) == 1) return FERRY_UNSUPPORTED;
    EXPECT_EQ(ferry_rank_barrier(rank), FERRY_PEER_LOST);
    const ferry_error_record record = last_record();
    EXPECT_EQ(record.status, FERRY_PEER_LOST);
    EXPECT_EQ(record.kind, FERRY_RECORD_WAIT);
    EXPECT_EQ(record.wait.peer, 1);
    EXPECT_TRUE(last_error_contains("rank 1"));
    return FERRY_PEER_LOST;
  };
  EXPECT_EQ(ferry_group_run(group.get(), body, nullptr), FERRY_UNSUPPORTED);
  EXPECT_TRUE(last_error_contains("the rank's body returned 6 (unsupported)"));
}

TEST(Groups, EveryStatusOfABodyIsReturned) {
  for (const ferry_status status : {FERRY_USAGE, FERRY_OVERFLOW, FERRY_TIMEOUT, FERRY_PEER_LOST, FERRY_SYSTEM,
                                    FERRY_UNSUPPORTED, FERRY_OTHER}) {
    ferry_status returned = status;
    const auto body = [](ferry_rank*, void* user) { return *static_cast<ferry_status*>(user); };
    EXPECT_EQ(ferry_group_run(threads(1).get(), body, &returned), status);
    EXPECT_TRUE(last_error_contains("returned " + std::to_string(status)));
  }
  ferry_status unknown = 42;
  const auto body = [](ferry_rank*, void* user) { return *static_cast<ferry_status*>(user); };
  EXPECT_EQ(ferry_group_run(threads(1).get(), body, &unknown), FERRY_OTHER);
  EXPECT_TRUE(last_error_contains("returned 42"));
}

TEST(Groups, TheStatusOfAFailedCallKeepsItsMessage) {
  const auto body = [](ferry_rank* rank, void*) -> ferry_status {
    ferry_config config = small_config();
    config.top_k = 99;
    ferry_exchange* exchange = nullptr;
    return ferry_exchange_create(rank, &config, &exchange);
  };
  EXPECT_TRUE(is_refused(ferry_group_run(threads(2).get(), body, nullptr), "top_k = 99"));
}

struct BootstrapCalls {
  int gathers = 0, barriers = 0;
  ferry_status gather_status = FERRY_OK;
};

ferry_status gather_alone(const void* mine, void* all, std::size_t bytes, void* user) {
  auto& calls = *static_cast<BootstrapCalls*>(user);
  ++calls.gathers;
  std::memcpy(all, mine, bytes);
  return calls.gather_status;
}

ferry_status barrier_alone(void* user) {
  ++static_cast<BootstrapCalls*>(user)->barriers;
  return FERRY_OK;
}

TEST(Groups, UseTheCallersBootstrap) {
  BootstrapCalls calls;
  auto bootstrap = sized<ferry_bootstrap>();
  bootstrap.ranks = 1;
  bootstrap.all_gather = gather_alone;
  bootstrap.barrier = barrier_alone;
  bootstrap.user = &calls;
  std::string host = "any host";
  bootstrap.host_id = host.c_str();
  ferry_group* made = nullptr;
  ASSERT_EQ(ferry_group_custom(&bootstrap, nullptr, &made), FERRY_OK) << ferry_last_error();
  host = "not read any more";
  const GroupHandle group(made, ferry_group_destroy);
  EXPECT_EQ(run(made,
                [](ferry_rank* rank) {
                  EXPECT_EQ(ferry_rank_size(rank), 1);
                  EXPECT_TRUE(rank->rank.topology().simulated());  // by its text
                }),
            FERRY_OK);
  EXPECT_GT(calls.gathers, 0);
  EXPECT_GT(calls.barriers, 0);

  calls.gather_status = FERRY_SYSTEM;
  EXPECT_EQ(run(made, [](ferry_rank*) { ADD_FAILURE() << "the body must not run"; }), FERRY_SYSTEM);
  EXPECT_TRUE(last_error_contains("ferry_bootstrap.all_gather returned 5 (system)"));

  bootstrap.rank = 1;
  EXPECT_TRUE(is_refused(ferry_group_custom(&bootstrap, nullptr, &made),
                         "rank 1 does not exist in a group of 1 rank"));
  bootstrap.rank = 0;
  bootstrap.barrier = nullptr;
  EXPECT_EQ(ferry_group_custom(&bootstrap, nullptr, &made), FERRY_USAGE);
}

}  // namespace
}  // namespace ferry::capi_test
