// Groups over several hosts, simulated on this one: discovery, collectives, and what is lost with a host.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>
#include <map>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/text.hpp"
#include "ferry/exchange.hpp"
#include "group/rank_state.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

using Hosts = std::vector<std::string>;

constexpr double kDeadline = 1;  // seconds, where a rank is missing

// The kinds of groups that can span hosts, of those that this program covers.
std::vector<GroupKind> kinds_over_hosts() {
  std::vector<GroupKind> kinds;
  for (const GroupKind kind : kGroupKinds) {
    if (kind == GroupKind::custom_threads || kind == GroupKind::custom_processes) kinds.push_back(kind);
  }
  return kinds;
}

class GroupsOverHosts : public testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, GroupsOverHosts, testing::ValuesIn(kinds_over_hosts()),
                         [](const auto& kind) { return name(kind.param); });

Topology topology_of(const Hosts& hosts) {
  std::map<std::string, int> labels;
  std::vector<int> nodes;
  for (const std::string& host : hosts)
    nodes.push_back(labels.try_emplace(host, static_cast<int>(labels.size())).first->second);
  return Topology(nodes, true);
}

TEST_P(GroupsOverHosts, DiscoverTheirNodesAndGatherTheBytesOfEveryRank) {
  Random random(seed());
  std::vector<Hosts> cases = {{"b", "a", "b", "a", "a"}, {"x", "y"}, {"x", "", "", "x"}};
  for (int i = 0; i < 5; ++i) {
    Hosts hosts(static_cast<std::size_t>(2 + below(random, 7)));
    for (std::string& host : hosts) host = str("host ", below(random, 3));
    cases.push_back(hosts);
  }
  for (const Hosts& hosts : cases) {
    const Topology expected = topology_of(hosts);
    run_hosts(GetParam(), hosts, kNoFaultDeadline, [&](const Rank& rank) {
      FERRY_CHECK(rank.topology() == expected, str("rank ", rank.index(), ", ", rank.topology().nodes()));
      FERRY_CHECK(rank.state().one_host() == (expected.nodes() == 1), "");
      std::uint64_t round = 0;
      for (const std::size_t bytes : {0, 1, 8, 16383, 16384, 16385, 50000})
        check_gather(rank, seed() + ++round, bytes);
      rank.barrier();
    });
  }
}

TEST_P(GroupsOverHosts, GatherInOrderUnderRandomDelays) {
  run_hosts(GetParam(), {"a", "b", "a", "b"}, kNoFaultDeadline, [](const Rank& rank) {
    Random jitter(seed() + static_cast<std::uint64_t>(rank.index()));
    for (std::uint64_t round = 0; round < 200; ++round) {
      if (below(jitter, 20) == 0) sleep_seconds(below(jitter, 200) * 1e-6);
      check_gather(rank, seed() + round, 16);
    }
  });
}

// Ranks that are threads of one process are not in shared memory across hosts.
TEST_P(GroupsOverHosts, AreRefusedByBackendsThatNeedSharedMemory) {
  run_hosts(GetParam(), {"a", "b", "b"}, kNoFaultDeadline, [](const Rank& rank) {
    FERRY_CHECK(!rank.same_process(), "");
    for (const BackendKind backend : {BackendKind::cpu, BackendKind::cuda}) {
      const auto error = expect_thrown<UnsupportedError>([&] {
        Exchange exchange(rank,
                          {.experts = 6, .top_k = 2, .hidden = 16, .max_tokens = 4, .backend = backend});
      });
      require_text(
          error,
          str("the backend ", to_string(backend),
              " needs all ranks on one host; these 3 ranks are on 2 hosts: use the backend collective"));
    }
    rank.barrier();
  });
}

// Rank 3, on host b, does not call; all others wait for it.
TEST_P(GroupsOverHosts, LearnOfASilentRankOnAnotherHostByTheDeadline) {
  const SharedValue<std::atomic<int>> gave_up;
  run_hosts(GetParam(), {"a", "a", "b", "b"}, kDeadline, [&](const Rank& rank) {
    if (rank.index() == 3) {
      await_ranks(gave_up, 3);
      return;
    }
    const Stopwatch watch;
    const auto error = expect_thrown<TimeoutError>([&] { rank.barrier(); });
    FERRY_CHECK(watch.own_seconds() < kDeadline + 1, str(watch.own_seconds()));
    FERRY_CHECK(error.record.rank == rank.index(), describe(error.record));
    if (rank.index() == 2) {
      require_text(error, "no sign of rank 3 for 1 s");
      FERRY_CHECK(error.record.peer == 3, describe(error.record));
    } else {
      require_text(error, "no sign for 1 s of a rank on another host");
      require_text(error, "for ranks 2, 3");
    }
    ++*gave_up;
    expect_thrown<TimeoutError>([&] { rank.barrier(); });  // final
  });
}

// Ranks 0 and 1 are on host a with rank 2, which throws; rank 3 is alone on host b.
TEST_P(GroupsOverHosts, LearnOfAFailedRankOnTheSameHostAtOnce) {
  const auto run = [&] {
    run_hosts(GetParam(), {"a", "a", "a", "b"}, kDeadline, [](const Rank& rank) {
      rank.barrier();
      if (rank.index() == 2) throw UsageError("seventeen is too many");
      const Stopwatch watch;
      if (rank.index() == 3) {
        require_text(expect_thrown<TimeoutError>([&] { rank.barrier(); }), "for ranks 0, 1, 2");
        FERRY_CHECK(watch.own_seconds() < kDeadline + 1, str(watch.own_seconds()));
        return;
      }
      const auto error = expect_thrown<PeerLostError>([&] { rank.barrier(); });
      FERRY_CHECK(watch.own_seconds() < kDeadline / 2, str(watch.own_seconds()));
      require_text(error, "rank 2 ended by an error: seventeen is too many");
      FERRY_CHECK(error.record.rank == rank.index() && error.record.peer == 2, describe(error.record));
    });
  };
  if (GetParam() == GroupKind::custom_threads) {
    require_text(expect_thrown<UsageError>(run), "seventeen is too many");
  } else {
    require_text(expect_thrown<std::runtime_error>(run), "ended badly: rank 2 with status 256");
  }
}

TEST_P(GroupsOverHosts, LearnThatARankOfTheSameHostHasLeftAtOnce) {
  run_hosts(GetParam(), {"a", "b", "a"}, kDeadline, [](const Rank& rank) {
    rank.barrier();
    if (rank.index() == 2) return;
    const Stopwatch watch;
    if (rank.index() == 1) {
      expect_thrown<TimeoutError>([&] { rank.barrier(); });
      return;
    }
    require_text(expect_thrown<PeerLostError>([&] { rank.barrier(); }), "rank 2 has left the group");
    FERRY_CHECK(watch.own_seconds() < kDeadline / 2, str(watch.own_seconds()));
  });
}

TEST_P(GroupsOverHosts, ARankMayLeaveAtAnyMomentAfterItHasCalledTheLastBarrier) {
  for (int round = 0; round < 20; ++round) {
    run_hosts(GetParam(), {"a", "b", "a", "b"}, kNoFaultDeadline, [&](const Rank& rank) {
      Random jitter(seed() + static_cast<std::uint64_t>(100 * round + rank.index()));
      sleep_seconds(below(jitter, 2000) * 1e-6);
      rank.barrier();
    });
  }
}

TEST_P(GroupsOverHosts, LearnThatAProcessOfTheSameHostWasKilledAtOnce) {
  if (GetParam() != GroupKind::custom_processes) GTEST_SKIP() << "a thread cannot be killed";
  const auto error = expect_thrown<std::runtime_error>([&] {
    run_hosts(GetParam(), {"a", "b", "a", "b"}, kDeadline, [](const Rank& rank) {
      rank.barrier();
      if (rank.index() == 2) raise(SIGKILL);
      const Stopwatch watch;
      if (rank.index() == 0) {
        require_text(expect_thrown<PeerLostError>([&] { rank.barrier(); }), "rank 2 (process ");
        FERRY_CHECK(watch.own_seconds() < kDeadline / 2, str(watch.own_seconds()));
      } else {
        require_text(expect_thrown<TimeoutError>([&] { rank.barrier(); }), "for ranks 0, 2");
        FERRY_CHECK(watch.own_seconds() < kDeadline + 1, str(watch.own_seconds()));
      }
    });
  });
  require_text(error, "ended badly: rank 2 with status 9");
}

// Ranks as threads over a bootstrap that `damage` changes, each on a host of its own unless `one_host`.
struct Outcome {
  std::exception_ptr error;
  double seconds = 0;
};

std::vector<Outcome> run_damaged(int ranks, const std::function<void(Bootstrap&)>& damage, const Hosts& hosts,
                                 const std::function<void(Rank)>& body) {
  const TestBootstrap meeting(ranks);
  std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      const Stopwatch watch;
      try {
        Bootstrap bootstrap = meeting.bootstrap(rank);
        bootstrap.host_id = hosts[static_cast<std::size_t>(rank)];
        damage(bootstrap);
        Group group = Group::custom(bootstrap);
        group.set_deadline(kDeadline);
        group.run(body);
      } catch (...) {
        outcome.error = std::current_exception();
      }
      outcome.seconds = watch.own_seconds();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

template <class Expected>
void expect_error(const Outcome& outcome, const std::string& text) {
  ASSERT_NE(outcome.error, nullptr) << text;
  try {
    std::rethrow_exception(outcome.error);
  } catch (const Expected& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

// Abandoned calls of these tests end with the test: they wait for `released`.
struct Gate {
  std::promise<void> opened;
  std::shared_future<void> released = opened.get_future().share();
  ~Gate() { opened.set_value(); }
};

TEST(BootstrapsOfHosts, ThatBlockForEverEndByTheDeadline) {
  for (const int blocked_call : {1, 2, 6}) {  // in the introduction, the offers, a later barrier
    Gate gate;
    std::atomic<int> returned = 0;
    const auto block = [&](Bootstrap& bootstrap) {
      bootstrap.all_gather = [gather = bootstrap.all_gather, released = gate.released, blocked_call,
                              calls = std::make_shared<int>(0)](const void* mine, void* all,
                                                                std::size_t bytes) {
        if (++*calls == blocked_call) return released.wait();
        gather(mine, all, bytes);
      };
    };
    const auto outcomes = run_damaged(3, block, {"a", "b", "b"}, [&](const Rank& rank) {
      while (true) rank.barrier();
      ++returned;
    });
    for (const Outcome& outcome : outcomes) {
      expect_error<TimeoutError>(outcome,
                                 blocked_call < 3 ? "s for Bootstrap::all_gather to return" : "rank ");
      EXPECT_LT(outcome.seconds, kDeadline + 1.5);
    }
  }
}

TEST(BootstrapsOfHosts, ThatThrowPassTheirErrorOnAndFailTheirHost) {
  const auto damage = [](Bootstrap& bootstrap) {
    if (bootstrap.rank != 0) return;
    bootstrap.all_gather = [gather = bootstrap.all_gather, calls = std::make_shared<int>(0)](
                               const void* mine, void* all, std::size_t bytes) {
      if (++*calls == 6) throw std::out_of_range("the wire is cut");
      gather(mine, all, bytes);
    };
  };
  const auto outcomes = run_damaged(3, damage, {"a", "b", "a"}, [](const Rank& rank) {
    while (true) rank.barrier();
  });
  expect_error<std::out_of_range>(outcomes[0], "the wire is cut");
  expect_error<TimeoutError>(outcomes[1], "for ranks 0, 2");
  expect_error<PeerLostError>(outcomes[2], "rank 0: the bootstrap failed: the wire is cut");
  EXPECT_LT(outcomes[2].seconds, kDeadline);
}

TEST(BootstrapsOfHosts, ThatReturnOtherDataAreRefused) {
  enum class Fault { swapped, stale };
  for (const Fault fault : {Fault::swapped, Fault::stale}) {
    const auto damage = [&](Bootstrap& bootstrap) {
      const auto last = std::make_shared<std::vector<std::byte>>();
      bootstrap.all_gather = [gather = bootstrap.all_gather, calls = std::make_shared<int>(0), last, fault,
                              ranks = bootstrap.ranks](const void* mine, void* all, std::size_t bytes) {
        gather(mine, all, bytes);
        auto* parts = static_cast<std::byte*>(all);
        const std::size_t total = bytes * static_cast<std::size_t>(ranks);
        if (++*calls == 6 && fault == Fault::swapped) std::swap_ranges(parts, parts + bytes, parts + bytes);
        if (*calls == 6 && fault == Fault::stale) std::memcpy(all, last->data(), total);
        last->assign(parts, parts + total);
      };
    };
    const auto outcomes = run_damaged(2, damage, {"a", "b"}, [](const Rank& rank) {
      while (true) rank.barrier();
    });
    for (const Outcome& outcome : outcomes) {
      expect_error<UsageError>(outcome,
                               fault == Fault::swapped
                                   ? "returned the data of rank 1 at the index of rank 0"
                                   : "Bootstrap::all_gather returned what rank 0 passed in collective");
    }
  }
}

TEST(BootstrapsOfHosts, DifferentLengthsAreRefused) {
  // Large enough for both, so that the bootstrap itself does not notice.
  const auto pad = [](Bootstrap& bootstrap) {
    bootstrap.all_gather = [gather = bootstrap.all_gather, ranks = bootstrap.ranks](
                               const void* mine, void* all, std::size_t bytes) {
      constexpr std::size_t kPadded = 1024;
      std::vector<std::byte> one(kPadded), padded(kPadded * static_cast<std::size_t>(ranks));
      std::memcpy(one.data(), mine, bytes);
      gather(one.data(), padded.data(), kPadded);
      for (int rank = 0; rank < ranks; ++rank) {
        const auto index = static_cast<std::size_t>(rank);
        std::memcpy(static_cast<std::byte*>(all) + index * bytes, padded.data() + index * kPadded, bytes);
      }
    };
  };
  const auto outcomes = run_damaged(2, pad, {"a", "b"}, [](const Rank& rank) {
    std::vector<char> mine(8), all(64);
    rank.all_gather(mine.data(), all.data(), rank.index() == 0 ? 4 : 8);
  });
  expect_error<UsageError>(outcomes[0], "rank 0 passes 4, rank 1 passes 8");
  expect_error<UsageError>(outcomes[1], "rank 1 passes 8, rank 0 passes 4");
}

TEST(BootstrapsOfHosts, MustNotCallFerry) {
  const auto damage = [](Bootstrap& bootstrap) {
    bootstrap.all_gather = [](const void*, void*, std::size_t) {
      Group::custom(TestBootstrap(1).bootstrap(0)).join();
    };
  };
  for (const Outcome& outcome : run_damaged(1, damage, {""}, [](const Rank&) {}))
    expect_error<UsageError>(outcome, "Bootstrap::all_gather called Group::run or Group::join of Ferry");
}

// Not with sanitizers: smaller groups run the same code, and these take a minute.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(LargeGroups, OfThreadsGatherOverSimulatedNodes) {
  for (const auto& [ranks, nodes] : {std::pair(256, 32), std::pair(1024, 8)}) {
    Group group = Group::threads(ranks, nodes);
    group.set_deadline(kNoFaultDeadline);
    group.run([&, nodes = nodes](const Rank& rank) {
      FERRY_CHECK(rank.topology().nodes() == nodes, "");
      check_gather(rank, seed(), 8);
    });
  }
}

TEST(LargeGroups, GatherOverHosts) {
  Hosts hosts;
  for (int rank = 0; rank < 256; ++rank) hosts.push_back(str("host ", rank % 32));
  run_hosts(GroupKind::custom_threads, hosts, kNoFaultDeadline, [](const Rank& rank) {
    FERRY_CHECK(rank.topology().nodes() == 32 && rank.topology().ranks_of(31).size() == 8, "");
    check_gather(rank, seed(), 8);
  });
}
#endif

}  // namespace
}  // namespace ferry::test
