// Exchange of file descriptors between ranks.
#include "memory/symmetric_memory.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <string>

#include "base/descriptors.hpp"
#include "group/rank_state.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/stranger.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

class DescriptorExchange : public testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, DescriptorExchange, testing::ValuesIn(kGroupKinds),
                         [](const auto& kind) { return name(kind.param); });

std::uint64_t content(int rank, int round) {
  return (seed() * 31 + static_cast<std::uint64_t>(rank)) * 1009 + static_cast<std::uint64_t>(round);
}

FileDescriptor file_of(int rank, int round) {
  FileDescriptor file(memfd_create("ferry-test", MFD_CLOEXEC));
  const std::uint64_t value = content(rank, round);
  FERRY_CHECK(write(file.number(), &value, sizeof value) == sizeof value, "no file");
  return file;
}

void check_round(const Rank& rank, int round) {
  const FileDescriptor mine = file_of(rank.index(), round);
  const std::vector<FileDescriptor> all = exchange_descriptors(rank, mine);
  FERRY_CHECK(static_cast<int>(all.size()) == rank.size(), str(all.size()));
  for (int peer = 0; peer < rank.size(); ++peer) {
    std::uint64_t value = 0;
    FERRY_CHECK(all[peer].number() != mine.number(), "");
    FERRY_CHECK(pread(all[peer].number(), &value, sizeof value, 0) == sizeof value, str("rank ", peer));
    FERRY_CHECK(value == content(peer, round), str("rank ", peer, " sent another file"));
    FERRY_CHECK((fcntl(all[peer].number(), F_GETFD) & FD_CLOEXEC) != 0, "the descriptor would be inherited");
  }
}

// Files that threads of other ranks have open now, and those that watch a slow peer.
constexpr long kSlack = 8;

long open_files() {
  namespace fs = std::filesystem;
  return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
}

TEST_P(DescriptorExchange, ReachEveryRank) {
  run_ranks(GetParam(), 4, 30, [](const Rank& rank) {
    for (int round = 0; round < 50; ++round) check_round(rank, round);
  });
}

TEST_P(DescriptorExchange, ReachManyRanks) {
  run_ranks(GetParam(), 16, 30, [](const Rank& rank) { check_round(rank, 0); });
}

TEST_P(DescriptorExchange, AreClosed) {
  run_ranks(GetParam(), 3, 30, [](const Rank& rank) {
    for (int round = 0; round < 5; ++round) check_round(rank, round);
    rank.barrier();
    const long before = open_files();
    rank.barrier();
    for (int round = 0; round < 200; ++round) check_round(rank, round);
    rank.barrier();
    FERRY_CHECK(open_files() <= before + kSlack, str(before, " files before"));
    rank.barrier();
  });
}

TEST_P(DescriptorExchange, InvalidDescriptorThrowsOnAllRanks) {
  run_ranks(GetParam(), 3, 30, [](const Rank& rank) {
    const FileDescriptor mine = rank.index() == 1 ? FileDescriptor() : file_of(rank.index(), 0);
    require_text(expect_thrown<SystemError>([&] { exchange_descriptors(rank, mine); }),
                 "rank 1: cannot duplicate a file");
    check_round(rank, 1);
  });
}

TEST_P(DescriptorExchange, MessagesOfStrangersAreIgnored) {
  const Stranger stranger;
  run_ranks(GetParam(), 3, 30, [](const Rank& rank) {
    for (int round = 0; round < 50; ++round) check_round(rank, round);
    rank.barrier();
    const long before = open_files();
    rank.barrier();
    for (int round = 0; round < 200; ++round) check_round(rank, round);
    rank.barrier();
    FERRY_CHECK(open_files() <= before + kSlack, str(before, " files before, ", open_files(), " after"));
    rank.barrier();
  });
}

// Strangers neither wake a socket nor fill its queue, which holds 10 messages by default.
TEST(DescriptorSocket, StrangersLeaveNothing) {
  const DescriptorSocket socket, friendly;
  const long before = open_files();
  const Stranger stranger;
  const Stopwatch watch;
  int messages = 0;
  while (stranger.messages() < 20000 && watch.seconds() < 30) {
    pollfd entry{socket.descriptor(), POLLIN, 0};
    EXPECT_EQ(poll(&entry, 1, 1), 0) << "after " << stranger.messages() << " messages";
    ASSERT_EQ(friendly.send(socket.address(), messages, file_of(messages, 0)), 0);
    const auto message = socket.receive();
    ASSERT_TRUE(message);
    EXPECT_EQ(message->from, messages);
    std::uint64_t value = 0;
    EXPECT_EQ(pread(message->file.number(), &value, sizeof value, 0), static_cast<ssize_t>(sizeof value));
    EXPECT_EQ(value, content(messages, 0));
    ++messages;
  }
  EXPECT_GE(stranger.messages(), 20000);
  EXPECT_EQ(open_files(), before);
}

// Even with the secret.
TEST(DescriptorSocket, OpensOneFileOfAMessage) {
  const DescriptorSocket socket, friendly;
  const FileDescriptor file = file_of(0, 0);
  const SocketAddress to = socket.address();
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strcpy(name.sun_path + 1, to.name.data());
  std::string bytes(24, 0);
  std::memcpy(bytes.data(), &to.secret, sizeof to.secret);
  bytes[16] = 5;
  const long before = open_files();
  for (int files = 0; files <= 8; ++files) {
    const auto name_bytes =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + std::strlen(to.name.data()));
    ASSERT_TRUE(send_files(friendly.descriptor(), name, name_bytes, bytes, file.number(), files));
    const auto message = socket.receive();
    ASSERT_TRUE(message);
    EXPECT_EQ(message->from, 5);
    EXPECT_EQ(message->file.valid(), files > 0);
    EXPECT_EQ(open_files(), before + std::min(files, 1));
  }
  EXPECT_EQ(open_files(), before);
}

#ifdef FERRY_TEST_PROCESSES

TEST(DescriptorExchange, DescriptorLimitThrowsOnAllRanks) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the undefined behaviour sanitizer opens files to inspect memory";
#endif
  seed();  // drawn before the fork: all ranks use the same
  Group::processes(4).run([](const Rank& rank) {
    WaitRecord record;
    record.rank = rank.index();
    rank.state().check_peers(record);  // opens the descriptors that it needs to watch the peers
    rlimit before{};
    getrlimit(RLIMIT_NOFILE, &before);
    rank.barrier();
    const FileDescriptor mine = file_of(rank.index(), 0);
    if (rank.index() == 2) {
      rlimit tight = before;
      int room = 3;  // room for the duplicate, the socket, and the file of one peer
      for (tight.rlim_cur = 0; room > 0; ++tight.rlim_cur) {
        room -= fcntl(static_cast<int>(tight.rlim_cur), F_GETFD) < 0;
      }
      setrlimit(RLIMIT_NOFILE, &tight);
    }
    const auto error = expect_thrown<SystemError>([&] { exchange_descriptors(rank, mine); });
    require_text(error, "rank 2: cannot receive the file of rank");
    FERRY_CHECK(error.error_number == EMFILE, str(error.error_number));
    setrlimit(RLIMIT_NOFILE, &before);
    check_round(rank, 1);
  });
}

TEST(DescriptorExchange, KilledRankEndsTheExchange) {
  Random random(seed());
  for (int round = 0; round < 20; ++round) {
    const int victim = below(random, 4);
    const int microseconds = below(random, 4000);
    const Stopwatch watch;
    SharedValue<std::atomic<int>> noticed;
    EXPECT_THROW(Group::processes(4).run([&](const Rank& rank) {
      if (rank.index() == victim) kill_this_process_in(1 + microseconds);
      expect_thrown<PeerLostError>([&] {
        for (int i = 0;; ++i) check_round(rank, i);
      });
      ++*noticed;
    }),
                 PeerLostError);
    EXPECT_LT(watch.seconds(), 2.0);
    EXPECT_EQ(*noticed, 3) << "victim " << victim << " after " << microseconds << " us";
  }
}

#endif

}  // namespace
}  // namespace ferry::test
