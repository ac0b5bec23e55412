// The server of `ferry launch`: what it answers, and that no client can stop it.
#include "tools/ferry/launch/meeting_point.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <random>

#include "group/bootstrap_link.hpp"
#include "seed.hpp"

namespace ferry::app {
namespace {

using Bytes = std::vector<std::byte>;

// A connection that a process makes as some rank.
class Client {
 public:
  Client(const MeetingPoint& meeting, int rank) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    socket_ = FileDescriptor(ends[0]);
    EXPECT_EQ(DescriptorSocket().send(meeting.address(), rank, FileDescriptor(ends[1])), 0);
  }

  // Sends as much as there is room for.
  void send(const Bytes& bytes) const { ::send(socket_.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  void send(std::uint64_t announced, const Bytes& bytes) const {
    const FrameHead head{.bytes = announced, .failed = 0};
    Bytes message(sizeof head);
    std::memcpy(message.data(), &head, sizeof head);
    message.insert(message.end(), bytes.begin(), bytes.end());
    send(message);
  }

  // Reads all that has come. False: the connection is closed.
  bool read() {
    std::byte buffer[65536];
    while (true) {
      const ssize_t bytes = recv(socket_.number(), buffer, sizeof buffer, 0);
      if (bytes > 0) {
        input_.insert(input_.end(), buffer, buffer + bytes);
      } else {
        return bytes < 0 && errno == EAGAIN;
      }
    }
  }

  // The answer, which must be there, and no more than that.
  Bytes take_answer() {
    EXPECT_TRUE(read());
    FrameHead head{};
    EXPECT_GE(input_.size(), sizeof head);
    std::memcpy(&head, input_.data(), sizeof head);
    EXPECT_EQ(input_.size(), sizeof head + head.bytes);
    EXPECT_EQ(head.failed, 0U);
    Bytes answer(input_.begin() + sizeof head, input_.end());
    input_.clear();
    return answer;
  }

 private:
  FileDescriptor socket_;
  Bytes input_;
};

Bytes random_bytes(std::mt19937_64& random, std::size_t count) {
  Bytes bytes(count);
  std::ranges::generate(bytes, [&] { return static_cast<std::byte>(random()); });
  return bytes;
}

Bytes joined(const Bytes& a, const Bytes& b) {
  Bytes all = a;
  all.insert(all.end(), b.begin(), b.end());
  return all;
}

void expect_a_gather(MeetingPoint& meeting, Client& zero, Client& one, std::mt19937_64& random) {
  const Bytes first = random_bytes(random, 1000), second = random_bytes(random, 1000);
  zero.send(first.size(), first);
  meeting.serve();
  one.send(second.size(), second);
  meeting.serve();
  EXPECT_EQ(zero.take_answer(), joined(first, second));
  EXPECT_EQ(one.take_answer(), joined(first, second));
}

TEST(MeetingPoint, ClosesConnectionsThatBreakTheProtocol) {
  std::mt19937_64 random(test::seed());
  MeetingPoint meeting(2);
  Client zero(meeting, 0);
  meeting.serve();
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  for (const std::uint64_t announced : {kMost, kMost - 15, kMost - 16, kMost / 2 + 1, std::uint64_t{1} << 40,
                                        std::uint64_t{kMostFrameBytes} + 1, std::uint64_t{3}}) {
    SCOPED_TRACE(announced);
    Client broken(meeting, 1);
    broken.send(announced, random_bytes(random, 100));
    meeting.serve();
    meeting.serve();
    EXPECT_FALSE(broken.read());
    Client one(meeting, 1);
    meeting.serve();
    expect_a_gather(meeting, zero, one, random);
  }
  for (int i = 0; i < 1000; ++i) {
    const Client broken(meeting, 1);
    broken.send(random_bytes(random, random() % 70000));
    meeting.serve();
    meeting.serve();
  }
  Client one(meeting, 1);
  meeting.serve();
  expect_a_gather(meeting, zero, one, random);
}

TEST(MeetingPoint, TakesOneConnectionOfARankAtATime) {
  std::mt19937_64 random(test::seed());
  MeetingPoint meeting(2);
  std::optional<Client> zero(std::in_place, meeting, 0);
  Client one(meeting, 1);
  for (int rank : {-1, 0, 1, 2, std::numeric_limits<int>::max()}) {
    Client second(meeting, rank);
    meeting.serve();
    meeting.serve();
    EXPECT_FALSE(second.read()) << rank;
  }
  expect_a_gather(meeting, *zero, one, random);
  zero.emplace(meeting, 0);
  expect_a_gather(meeting, *zero, one, random);
}

TEST(MeetingPoint, DoesNotWaitForARankThatDoesNotRead) {
  std::mt19937_64 random(test::seed());
  MeetingPoint meeting(2);
  Client zero(meeting, 0), one(meeting, 1);
  const Bytes part = random_bytes(random, 150000);  // both together are more than a socket holds
  const auto begin = std::chrono::steady_clock::now();
  zero.send(part.size(), part);
  meeting.serve();
  one.send(part.size(), part);
  for (int i = 0; i < 100; ++i) {
    meeting.serve();
    EXPECT_TRUE(one.read());
  }
  EXPECT_EQ(one.take_answer(), joined(part, part));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(900));
  for (int i = 0; i < 100; ++i) {
    meeting.serve();
    EXPECT_TRUE(zero.read());
  }
  EXPECT_EQ(zero.take_answer(), joined(part, part));
}

}  // namespace
}  // namespace ferry::app
