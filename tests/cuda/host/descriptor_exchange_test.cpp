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

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "base/descriptors.hpp"
#include "group/rank_state.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"
#include "seed.hpp"

namespace ferry::test {
namespace {

// ---- another user of the host, who attacks the local sockets of Ferry

// Sends random bytes with `files` duplicates of a file. False if they could not be sent.
bool send_files(int socket, const sockaddr_un& to, socklen_t to_bytes, const std::string& bytes, int file,
                int files) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  constexpr int kMostFiles = 8;
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFiles * sizeof file)] = {};
  msghdr message{};
  message.msg_name = const_cast<sockaddr_un*>(&to);
  message.msg_namelen = to_bytes;
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (files > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(static_cast<std::size_t>(files) * sizeof file);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(static_cast<std::size_t>(files) * sizeof file);
    for (int i = 0; i < files; ++i)
      std::memcpy(CMSG_DATA(header) + static_cast<std::size_t>(i) * sizeof file, &file, sizeof file);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

// From construction to destruction a process of user 65534, or of this one where only root may change it,
// sends messages of random bytes and up to 8 files to every abstract socket whose name begins as those of
// Ferry.
class Stranger {
 public:
  Stranger() {
    const std::uint64_t first = seed();
    process_ = fork();
    if (process_ == 0) attack(first);
  }
  ~Stranger() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  long messages() const { return *messages_; }  // sent

 private:
  [[noreturn]] void attack(std::uint64_t first) const {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    constexpr uid_t kNobody = 65534;
    if (getuid() == 0 && setuid(kNobody) != 0) _exit(1);
    Random random(first);
    const FileDescriptor own(socket(AF_UNIX, SOCK_DGRAM, 0)), file(memfd_create("stranger", 0));
    while (true) {
      std::ifstream table("/proc/net/unix");
      for (std::string line; std::getline(table, line);) {
        const std::size_t at = line.find("@ferry-");
        sockaddr_un to{};
        if (at == std::string::npos || line.size() - at > sizeof to.sun_path) continue;
        to.sun_family = AF_UNIX;
        std::memcpy(to.sun_path + 1, line.data() + at + 1, line.size() - at - 1);
        constexpr int kMessages = 20, kSizeOfARanks = 24;
        for (int i = 0; i < kMessages; ++i) {
          std::string bytes(
              static_cast<std::size_t>(below(random, 2) == 0 ? kSizeOfARanks : below(random, 100)), 0);
          std::ranges::generate(bytes, [&] { return static_cast<char>(random()); });
          const auto to_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + line.size() - at);
          if (send_files(own.number(), to, to_bytes, bytes, file.number(), below(random, 9))) ++*messages_;
        }
      }
    }
  }

  SharedValue<std::atomic<long>> messages_;
  pid_t process_;
};

// ---- the tests

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
