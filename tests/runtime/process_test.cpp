// Processes of ranks that die, stop or exit: peers notice, and no process is left behind.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/descriptors.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

template <class Expected>
Expected run_throws(Group group, const std::function<void(Rank)>& body) {
  try {
    group.run(body);
  } catch (const Expected& error) {
    return error;
  }
  throw std::runtime_error("run() threw nothing");
}

void expect_no_child_left() {
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

class KilledRanks : public testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, KilledRanks,
                         testing::Values(GroupKind::processes, GroupKind::custom_processes),
                         [](const auto& kind) { return name(kind.param); });

TEST_P(KilledRanks, AreNoticedByEveryPeerWithinASecond) {
  struct Shared {
    std::atomic<int> noticed;
  };
  SharedValue<Shared> shared;
  const auto body = [&](const Rank& rank) {
    TestLane lane(rank, 30);
    for (int i = 0; i < 10; ++i) lane.exchange();
    rank.barrier();  // no rank is still in its tenth exchange, which the death would end too
    if (rank.index() == 1) raise(SIGKILL);
    const Stopwatch watch;
    const auto error = expect_thrown<PeerLostError>([&] { lane.exchange(); });
    FERRY_CHECK(watch.own_seconds() < 1.0, str(watch.own_seconds()));
    require_text(error, "rank 1 (process ");
    FERRY_CHECK(error.record.peer == 1 && error.record.rank == rank.index(), describe(error.record));
    FERRY_CHECK(error.record.operation == Operation::dispatch && error.record.call == 11,
                describe(error.record));
    ++shared->noticed;
  };
  try {
    run_ranks(GetParam(), 4, 30, body);
    FAIL() << "run() threw nothing";
  } catch (const PeerLostError& error) {
    EXPECT_NE(std::string(error.what()).find("was killed by signal 9 (Killed)"), std::string::npos)
        << error.what();
    EXPECT_EQ(error.record.peer, 1);
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(GetParam(), GroupKind::custom_processes) << error.what();
    EXPECT_STREQ(error.what(), "ended badly: rank 1 with status 9");
  }
  EXPECT_EQ(shared->noticed, 3);
  expect_no_child_left();
}

TEST_P(KilledRanks, AreNoticedDuringConstruction) {
  const Stopwatch watch;
  EXPECT_ANY_THROW(run_ranks(GetParam(), 3, 30, [](const Rank& rank) {
    rank.barrier();
    if (rank.index() == 0) raise(SIGKILL);
    SymmetricMemory(rank, 1 << 20);
  }));
  EXPECT_LT(watch.seconds(), 2.0);
}

TEST(Processes, KilledAtAnyMomentNeverBlockTheirPeers) {
  Random random(seed());
  for (int round = 0; round < 30; ++round) {
    const int victim = below(random, 4);
    const int microseconds = below(random, 4000);
    const Stopwatch watch;
    EXPECT_THROW(Group::processes(4).run([&](const Rank& rank) {
      if (rank.index() == victim) kill_this_process_in(1 + microseconds);
      while (true) {
        TestLane lane(rank, 30);
        for (int i = 0; i < 20; ++i) lane.exchange();
      }
    }),
                 PeerLostError);
    EXPECT_LT(watch.seconds(), 2.0);
  }
  expect_no_child_left();
}

TEST(Processes, OfAnotherPidNamespaceAreOnAnotherNode) {
  const TestBootstrap meeting(2);
  const auto join = [&](int rank) {
    Group::custom(meeting.bootstrap(rank)).run([](const Rank& as) {
      FERRY_CHECK(as.topology() == Topology({0, 1}), str(as.topology().nodes()));
      as.barrier();
    });
  };
  const pid_t here = fork();
  if (here == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      join(0);
      _exit(0);
    } catch (const std::exception&) {
      _exit(1);
    }
  }
  const int status = run_process([&] {
    if (unshare(getuid() == 0 ? CLONE_NEWPID : CLONE_NEWUSER | CLONE_NEWPID) != 0) _exit(kSkipped);
    const int other_status = run_process([&] { join(1); });  // the first process of the new namespace
    FERRY_CHECK(other_status == 0, str("status ", other_status));
  });
  const bool skipped = WIFEXITED(status) && WEXITSTATUS(status) == kSkipped;
  if (skipped) kill(here, SIGKILL);
  int status_here = 0;
  EXPECT_EQ(waitpid(here, &status_here, 0), here);
  if (skipped) GTEST_SKIP() << "this system does not allow a pid namespace";
  EXPECT_EQ(status, 0);
  EXPECT_EQ(status_here, 0);
}

constexpr std::string_view kSocketName = "ferry-";  // and random digits: how names of local sockets begin

// Makes what a peer said of itself look as if it came from another host with the same identity: its process
// number and the name of its local socket mean nothing here.
void move_to_another_host(std::byte* introduction, std::size_t bytes, pid_t process) {
  constexpr pid_t kNoProcess = 0x7ffffff0;
  int changed = 0;
  for (std::size_t i = 0; i + sizeof process <= bytes; i += sizeof process) {
    if (std::memcmp(introduction + i, &process, sizeof process) != 0) continue;
    std::memcpy(introduction + i, &kNoProcess, sizeof process);
    ++changed;
  }
  for (std::size_t i = 0; i + kSocketName.size() < bytes; ++i) {
    if (std::memcmp(introduction + i, kSocketName.data(), kSocketName.size()) != 0) continue;
    introduction[i + kSocketName.size()] = std::byte{'x'};
    ++changed;
  }
  FERRY_CHECK(changed == 2, str(changed, " changes"));
}

TEST(Processes, OfHostsThatLookAlikeAreRefusedAtOnce) {
  const TestBootstrap meeting(2);
  const SharedValue<std::array<pid_t, 2>> processes;
  const auto join = [&](int rank) {
    Bootstrap bootstrap = meeting.bootstrap(rank);
    bootstrap.all_gather = [&, rank, gather = bootstrap.all_gather, calls = 0](const void* mine, void* all,
                                                                               std::size_t bytes) mutable {
      (*processes)[static_cast<std::size_t>(rank)] = getpid();
      gather(mine, all, bytes);
      const int peer = 1 - rank;
      if (++calls == 1) {
        move_to_another_host(static_cast<std::byte*>(all) + static_cast<std::size_t>(peer) * bytes, bytes,
                             (*processes)[static_cast<std::size_t>(peer)]);
      }
    };
    const Stopwatch watch;
    Group group = Group::custom(bootstrap);
    const auto error = run_throws<UnsupportedError>(group, [](const Rank&) {});
    require_text(error, "ranks 0, 1 have the same boot id and namespaces but are not on one host");
    require_text(error, "set FERRY_HOST_ID to another text on each host");
    FERRY_CHECK(watch.own_seconds() < 1, str(watch.own_seconds()));
  };
  const pid_t other = fork();
  if (other == 0) _exit(run_process([&] { join(1); }) == 0 ? 0 : 1);
  join(0);
  int status = 0;
  EXPECT_EQ(waitpid(other, &status, 0), other);
  EXPECT_EQ(status, 0);
}

// A rank of two stops itself while it joins, in a process of its own; the other one times out in these words.
void expect_timeout_of_other(const TestBootstrap& meeting, const Bootstrap& stopping, const char* words) {
  const pid_t stopped = fork();
  if (stopped == 0) {
    Group::custom(stopping).run([](const Rank&) {});
    _exit(0);
  }
  constexpr double kDeadline = 1;
  const int other = 1 - stopping.rank;
  Group group = Group::custom(meeting.bootstrap(other));
  group.set_deadline(kDeadline);
  const Stopwatch watch;
  const auto error = run_throws<TimeoutError>(group, [](const Rank&) {});
  EXPECT_LT(watch.seconds(), kDeadline + 1);
  require_text(error, words);
  EXPECT_EQ(error.record.rank, other);
  EXPECT_EQ(error.record.peer, stopping.rank);
  kill(stopped, SIGKILL);
  EXPECT_EQ(waitpid(stopped, nullptr, 0), stopped);
}

// Rank 0 has told the others that it has made the control block, then stops before it sends them the file.
TEST(Processes, ThatWaitForTheFileOfAStoppedRankTimeOut) {
  const TestBootstrap meeting(2);
  Bootstrap first = meeting.bootstrap(0);
  first.all_gather = [gather = first.all_gather, calls = 0](const void* mine, void* all,
                                                            std::size_t bytes) mutable {
    gather(mine, all, bytes);
    if (++calls == 2) raise(SIGSTOP);
  };
  expect_timeout_of_other(meeting, first, "until rank 0 sends the file of the group's shared memory");
}

// Sends files to the local socket that a rank's introduction names, until it takes no more.
void fill_queue(const void* introduction, std::size_t bytes) {
  const std::string_view text(static_cast<const char*>(introduction), bytes);
  const std::size_t at = text.find(kSocketName);
  SocketAddress address;
  FERRY_CHECK(at != std::string::npos && at + sizeof address <= bytes, "no address");
  std::memcpy(&address, text.data() + at, sizeof address);
  const DescriptorSocket sender;
  const FileDescriptor file(memfd_create("file", MFD_CLOEXEC));
  while (sender.send(address, 0, file) == 0) continue;
}

// Rank 1 stops while its queue is full, so rank 0 cannot send it the file of the control block.
TEST(Processes, ThatSendTheFileToAStoppedRankTimeOut) {
  const TestBootstrap meeting(2);
  Bootstrap second = meeting.bootstrap(1);
  second.all_gather = [gather = second.all_gather, calls = 0](const void* mine, void* all,
                                                              std::size_t bytes) mutable {
    if (calls == 0) fill_queue(mine, bytes);
    gather(mine, all, bytes);
    if (++calls == 2) raise(SIGSTOP);
  };
  expect_timeout_of_other(meeting, second, "until rank 1 takes the file of the group's shared memory");
}

TEST(Processes, ThatExitInTheirBodyCountAsLost) {
  const auto error = run_throws<PeerLostError>(Group::processes(3), [](const Rank& rank) {
    rank.barrier();
    if (rank.index() == 2) _exit(5);
    rank.barrier();
  });
  require_text(error, "rank 2 (process ");
  require_text(error, "exited with status 5");
}

TEST(Processes, ThatAreStoppedTimeOutAndAreKilled) {
  SharedValue<std::atomic<int>> timeouts;
  constexpr double kDeadline = 1;
  Group group = Group::processes(4);
  group.set_deadline(kDeadline);
  const Stopwatch watch;
  const auto error = run_throws<TimeoutError>(group, [&](const Rank& rank) {
    TestLane lane(rank, kDeadline);
    lane.exchange();
    rank.barrier();
    if (rank.index() == 2) raise(SIGSTOP);
    const Stopwatch waited;
    const auto timeout = expect_thrown<TimeoutError>([&] { lane.exchange(); });
    FERRY_CHECK(waited.own_seconds() < kDeadline + 1, str(waited.own_seconds()));
    FERRY_CHECK(timeout.record.peer == 2, describe(timeout.record));
    ++*timeouts;
  });
  EXPECT_EQ(*timeouts, 3);
  EXPECT_EQ(error.record.peer, 2);
  require_text(error, "rank 2 was killed because it was stopped: no sign of rank 2 for 1 s");
  EXPECT_LT(watch.seconds(), kDeadline + 1);
  expect_no_child_left();
}

// Rank 2 hangs in its own code. Rank 1 gets the time to end that survivors have.
TEST(Processes, ThatHangAreKilledAndSurvivorsMayEnd) {
  SharedValue<std::atomic<int>> ended;
  constexpr double kDeadline = 2;
  Group group = Group::processes(3);
  group.set_deadline(kDeadline);
  const Stopwatch watch;
  const auto error = run_throws<TimeoutError>(group, [&](const Rank& rank) {
    rank.barrier();
    if (rank.index() == 2) sleep_seconds(60);
    expect_thrown<TimeoutError>([&] { rank.barrier(); });
    if (rank.index() == 1) sleep_seconds(2.5);
    ++*ended;
  });
  EXPECT_EQ(*ended, 2);
  require_text(error,
               "rank 2 was killed because it did not end within 2 s of the group's failure: no sign of");
  EXPECT_LT(watch.seconds(), kDeadline + 2 + 1);
  expect_no_child_left();
}

TEST(Processes, PassEveryTypeOfErrorToTheParent) {
  const auto run = [](const std::function<void()>& act) {
    Group::processes(2).run([&](const Rank& rank) {
      if (rank.index() == 1) act();
      rank.barrier();
    });
  };
  const BadId bad{.rank = 1, .token = 2, .slot = 3, .id = 4, .count = 5};
  const auto bad_id = expect_thrown<BadIdError>([&] { run([&] { throw BadIdError("id", bad); }); });
  EXPECT_STREQ(bad_id.what(), "rank 1: id");
  EXPECT_TRUE(bad_id.bad.rank == 1 && bad_id.bad.token == 2 && bad_id.bad.slot == 3 && bad_id.bad.id == 4 &&
              bad_id.bad.count == 5);
  const BadSource source{.rank = 6, .index = 7, .count = 8};
  const auto bad_source =
      expect_thrown<BadSourceError>([&] { run([&] { throw BadSourceError("source", source); }); });
  EXPECT_TRUE(bad_source.bad.rank == 6 && bad_source.bad.index == 7 && bad_source.bad.count == 8);
  const Overflow overflow{.rank = 1, .capacity = 2, .needed = 3, .dropped = 4};
  const auto over =
      expect_thrown<OverflowError>([&] { run([&] { throw OverflowError("over", overflow); }); });
  EXPECT_TRUE(over.overflow.rank == 1 && over.overflow.capacity == 2 && over.overflow.needed == 3 &&
              over.overflow.dropped == 4);
  const WaitRecord wait{Operation::combine, 1, 0, 1, 3, 2};
  EXPECT_EQ(
      expect_thrown<TimeoutError>([&] { run([&] { throw TimeoutError("late", wait); }); }).record.expected,
      3u);
  EXPECT_EQ(
      expect_thrown<PeerLostError>([&] { run([&] { throw PeerLostError("lost", wait); }); }).record.call, 1u);
  EXPECT_EQ(expect_thrown<SystemError>([&] { run([] { throw SystemError("system", 28); }); }).error_number,
            28);
  expect_thrown<UnsupportedError>([&] { run([] { throw UnsupportedError("not here"); }); });
  EXPECT_STREQ(expect_thrown<std::runtime_error>([&] { run([] { throw std::out_of_range("far"); }); }).what(),
               "rank 1: far");
}

TEST(Processes, DieWithTheirParent) {
  SharedValue<std::array<std::atomic<int>, 2>> processes;
  const int status = run_process([&] {
    const pid_t parent = getpid();
    Group::processes(2).run([&](const Rank& rank) {
      (*processes)[rank.index()] = getpid();
      rank.barrier();
      if (rank.index() == 0) kill(parent, SIGKILL);
      sleep_seconds(60);
    });
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  const Stopwatch watch;
  for (const auto& process : *processes) {
    ASSERT_GT(process, 0);
    while (kill(process, 0) == 0 && watch.seconds() < 5) sleep_seconds(0.01);
    EXPECT_LT(watch.seconds(), 5) << "process " << process << " outlived its parent";
  }
}

}  // namespace
}  // namespace ferry::test
