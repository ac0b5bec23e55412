// Failures of a group: which rank gets which error, how soon, and how survivors continue.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/text.hpp"
#include "ferry/exchange.hpp"
#include "repeats.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

class GroupFailures : public testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, GroupFailures, testing::ValuesIn(kGroupKinds),
                         [](const auto& kind) { return name(kind.param); });

bool starts_ranks(GroupKind kind) {
  return kind == GroupKind::threads || kind == GroupKind::processes;
}

template <class Expected>
Expected expect_throw(const std::function<void()>& act) {
  try {
    act();
  } catch (const Expected& error) {
    return error;
  }
  throw std::runtime_error("nothing was thrown");
}

// Checks the error that run() throws. The ranks of a custom group of processes end separately: there only the
// exit status of the failed rank is visible.
template <class Expected>
void expect_run_throws(GroupKind kind, int ranks, double deadline, const std::string& text,
                       const std::function<void(Rank)>& body) {
  try {
    run_ranks(kind, ranks, deadline, body);
    FAIL() << "run() threw nothing";
  } catch (const Expected& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(kind, GroupKind::custom_processes) << error.what();
    EXPECT_STREQ(error.what(), "ended badly: rank 2 with status 256");
  }
}

TEST_P(GroupFailures, PeersOfARankThatThrowsGetPeerLostAtOnce) {
  expect_run_throws<UsageError>(GetParam(), 4, 30, "seventeen", [](const Rank& rank) {
    rank.barrier();
    if (rank.index() == 2) throw UsageError("seventeen is too many");
    const Stopwatch watch;
    const PeerLostError error = expect_throw<PeerLostError>([&] { rank.barrier(); });
    FERRY_CHECK(watch.own_seconds() < 1.0, str(watch.own_seconds()));
    FERRY_CHECK(std::string(error.what()).find("rank 2 ended by an error: seventeen is too many") !=
                    std::string::npos,
                error.what());
    FERRY_CHECK(error.record.rank == rank.index() && error.record.peer == 2, describe(error.record));
    // The failure is final: the next call throws it again.
    FERRY_CHECK(expect_throw<PeerLostError>([&] { rank.barrier(); }).record.peer == 2, "");
  });
}

// The copy of the rank leaves the body by return or by an exception; the rank goes on.
TEST_P(GroupFailures, AProcessForkedInTheBodyDoesNotSpeakForTheRank) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer does not follow forks of threads";
#endif
  constexpr int kSpoke = 3;
  for (const bool throws : {false, true}) {
    run_ranks(GetParam(), 3, 30, [&](const Rank& rank) {
      Exchange exchange(rank, {.experts = 3, .top_k = 1, .hidden = 8, .max_tokens = 1});
      const std::vector<std::uint16_t> token(8, 0x3F80);
      const std::int32_t id = (rank.index() + 1) % 3;
      const auto dispatch = [&] {
        return exchange.dispatch(Tokens::rows(token.data(), 1, DType::bf16), &id).host->total;
      };
      FERRY_CHECK(dispatch() == 1, "");
      if (rank.index() == 1) {
        const pid_t copy = fork();
        if (copy == 0) {
          for (const std::function<void()>& call :
               {std::function<void()>([&] { rank.barrier(); }), std::function<void()>(dispatch)}) {
            try {
              call();
              _exit(kSpoke);
            } catch (const UsageError&) {
            }
          }
          if (throws) throw std::runtime_error("of the copy");
          return;
        }
        const int status = status_of_process(copy);
        FERRY_CHECK(WIFEXITED(status) && WEXITSTATUS(status) != kSpoke, str(status));
      }
      FERRY_CHECK(dispatch() == 1, "");
      rank.barrier();
    });
  }
}

TEST_P(GroupFailures, RunThrowsTheFirstErrorAndNotItsConsequences) {
  if (!starts_ranks(GetParam())) GTEST_SKIP() << "a custom group starts no ranks";
  expect_run_throws<UnsupportedError>(GetParam(), 4, 30, "not here", [](const Rank& rank) {
    if (rank.index() == 3) throw UnsupportedError("not here");
    rank.barrier();
  });
}

TEST_P(GroupFailures, TheMessageNamesTheRankThatRaised) {
  if (!starts_ranks(GetParam())) GTEST_SKIP() << "a custom group starts no ranks";
  const auto run = [&](const std::function<void()>& raise) {
    run_ranks(GetParam(), 3, 30, [&](const Rank& rank) {
      if (rank.index() == 2) raise();
      rank.barrier();
    });
  };
  const auto known = expect_throw<UsageError>([&] { run([] { throw UsageError(std::string(400, 'u')); }); });
  EXPECT_EQ(known.what(), "rank 2: " + std::string(400, 'u'));
  const auto other = expect_throw<std::runtime_error>([&] { run([] { throw std::out_of_range("far"); }); });
  EXPECT_STREQ(other.what(), "rank 2: far");
}

TEST(GroupsOfThreads, NestTheOriginalException) {
  try {
    Group::threads(2).run([](const Rank& rank) {
      if (rank.index() == 1) throw std::out_of_range("far");
      rank.barrier();
    });
    FAIL() << "run() threw nothing";
  } catch (const std::runtime_error& error) {
    EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
}

TEST_P(GroupFailures, WaitingForARankThatHasLeftFails) {
  run_ranks(GetParam(), 4, 30, [](const Rank& rank) {
    rank.barrier();
    if (rank.index() == 1) return;
    const Stopwatch watch;
    const PeerLostError error = expect_throw<PeerLostError>([&] { rank.barrier(); });
    FERRY_CHECK(watch.own_seconds() < 1.0, str(watch.own_seconds()));
    FERRY_CHECK(std::string(error.what()).find("rank 1 has left") != std::string::npos, error.what());
    FERRY_CHECK(error.record.peer == 1 && error.record.rank == rank.index(), describe(error.record));
  });
}

TEST_P(GroupFailures, ARankMayLeaveAfterItHasCalledTheLastBarrier) {
  run_ranks(GetParam(), 4, 30, [](const Rank& rank) {
    for (int round = 0; round < 20; ++round) rank.barrier();
    if (rank.index() == 0) sleep_seconds(0.05);
    rank.barrier();  // the others may have left before rank 0 checks them
  });
}

// Tries the moments between a waiter's check of the flag and its check of the peer.
TEST_P(GroupFailures, ARankMayLeaveAtAnyMomentAfterItHasCalledTheLastBarrier) {
  Random random(seed());
  for (int round = 0; round < repeats(500); ++round) {
    const int yields = below(random, 150);
    run_ranks(GetParam(), 2, 30, [yields](const Rank& rank) {
      rank.barrier();
      if (rank.index() == 0) {
        for (int i = 0; i < yields; ++i) std::this_thread::yield();
      }
      rank.barrier();
    });
  }
}

TEST_P(GroupFailures, ATimeoutNamesTheMissingRank) {
  constexpr double kDeadline = 0.3;
  const SharedValue<std::atomic<int>> gave_up;
  run_ranks(GetParam(), 4, kDeadline, [&](const Rank& rank) {
    rank.barrier();
    if (rank.index() == 2) {
      await_ranks(gave_up, 3);
      expect_throw<TimeoutError>([&] { rank.barrier(); });
      return;
    }
    const Stopwatch watch;
    const TimeoutError error = expect_throw<TimeoutError>([&] { rank.barrier(); });
    ++*gave_up;
    FERRY_CHECK(watch.seconds() > 0.9 * kDeadline && watch.own_seconds() < kDeadline + 1.0,
                str(watch.own_seconds()));
    const WaitRecord& record = error.record;
    FERRY_CHECK(record.operation == Operation::barrier && record.rank == rank.index() && record.peer == 2,
                describe(record));
    FERRY_CHECK(record.expected == record.call && record.observed < record.expected, describe(record));
    FERRY_CHECK(std::string(error.what()).find("rank 2") != std::string::npos, error.what());
  });
}

TEST_P(GroupFailures, SurvivorsBuildANewGroup) {
  constexpr int kRanks = 4, kLost = 1;
  const TestBootstrap survivors(kRanks - 1);
  const auto body = [&](const Rank& rank) {
    rank.barrier();
    if (rank.index() == kLost) return;
    expect_throw<PeerLostError>([&] { rank.barrier(); });
    const int mine = rank.index() > kLost ? rank.index() - 1 : rank.index();
    Group::custom(survivors.bootstrap(mine)).run([&](const Rank& new_rank) {
      FERRY_CHECK(new_rank.size() == kRanks - 1 && new_rank.index() == mine, "");
      for (int i = 0; i < 100; ++i) new_rank.barrier();
    });
    expect_throw<PeerLostError>([&] { rank.barrier(); });  // the old group stays failed
  };
  run_ranks(GetParam(), kRanks, 30, body);
}

TEST_P(GroupFailures, SimultaneousFailuresThrowOneOfThem) {
  if (!starts_ranks(GetParam())) GTEST_SKIP() << "a custom group starts no ranks";
  for (int round = 0; round < 20; ++round) {
    try {
      run_ranks(GetParam(), 4, 30, [](const Rank& rank) { throw UsageError(str("rank ", rank.index())); });
      FAIL();
    } catch (const UsageError& error) {
      const std::string text = error.what();  // such as "rank 3: rank 3"
      EXPECT_EQ(text.substr(0, 6), text.substr(8));
    } catch (const PeerLostError&) {
      FAIL() << "a consequence was thrown instead of a cause";
    }
  }
}

}  // namespace
}  // namespace ferry::test
