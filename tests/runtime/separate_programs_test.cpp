// A custom group of separately started programs, which share nothing but a socket to the test.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "runtime/channel_support.hpp"

namespace ferry::test {
namespace {

constexpr int kRanks = 4;

void send_all(int socket, const void* data, std::size_t bytes) {
  FERRY_CHECK(write(socket, data, bytes) == static_cast<ssize_t>(bytes), "the socket was closed");
}

void receive_all(int socket, void* data, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t got = read(socket, static_cast<char*>(data) + done, bytes - done);
    FERRY_CHECK(got > 0, "the socket was closed");
    done += static_cast<std::size_t>(got);
  }
}

Bootstrap by_socket(int rank, int socket) {
  Bootstrap bootstrap;
  bootstrap.rank = rank;
  bootstrap.ranks = kRanks;
  bootstrap.all_gather = [socket](const void* mine, void* all, std::size_t bytes) {
    send_all(socket, &bytes, sizeof bytes);
    send_all(socket, mine, bytes);
    receive_all(socket, all, kRanks * bytes);
  };
  bootstrap.barrier = [gather = bootstrap.all_gather] {
    char all[kRanks];
    gather("", all, 1);
  };
  return bootstrap;
}

// The main program of one rank.
int run_rank(int rank, int socket, bool killed) {
  try {
    Group::custom(by_socket(rank, socket)).run([&](const Rank& as) {
      TestLane lane(as, 30);
      for (int i = 0; i < 100; ++i) lane.exchange();
      as.barrier();  // no rank is still in its last exchange, which a death would end too
      if (!killed) return;
      if (rank == 3) raise(SIGKILL);
      const Stopwatch watch;
      require_text(expect_thrown<PeerLostError>([&] { lane.exchange(); }), "rank 3 (process ");
      FERRY_CHECK(watch.seconds() < 1.0, str(watch.seconds()));
    });
  } catch (const std::exception& error) {
    std::cerr << "rank " << rank << ": " << error.what() << std::endl;
    return 1;
  }
  return 0;
}

pid_t start_rank(int rank, int socket, bool killed) {
  const pid_t process = fork();
  if (process != 0) return process;
  const std::string rank_text = std::to_string(rank), socket_text = std::to_string(socket);
  execl("/proc/self/exe", "rank", rank_text.c_str(), socket_text.c_str(), killed ? "1" : "0", nullptr);
  _exit(127);
}

// Serves the ranks' gathers until one of them closes its socket.
void serve(const int (&sockets)[kRanks]) {
  while (true) {
    std::string all;
    for (const int socket : sockets) {
      std::size_t bytes = 0;
      if (read(socket, &bytes, sizeof bytes) <= 0) return;
      std::string part(bytes, '\0');
      receive_all(socket, part.data(), bytes);
      all += part;
    }
    for (const int socket : sockets) send_all(socket, all.data(), all.size());
  }
}

void run_programs(bool killed) {
  int sockets[kRanks];
  pid_t processes[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    int pair[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    sockets[rank] = pair[0];
    processes[rank] = start_rank(rank, pair[1], killed);
    close(pair[1]);
  }
  serve(sockets);
  for (int rank = 0; rank < kRanks; ++rank) {
    int status = 0;
    waitpid(processes[rank], &status, 0);
    EXPECT_EQ(status, killed && rank == 3 ? SIGKILL : 0) << "rank " << rank;
    close(sockets[rank]);
  }
}

TEST(SeparatePrograms, JoinAndExchange) {
  run_programs(false);
}

TEST(SeparatePrograms, NoticeThatOneOfThemWasKilled) {
  run_programs(true);
}

}  // namespace
}  // namespace ferry::test

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  if (argc == 4 && std::string(argv[0]) == "rank") {
    return ferry::test::run_rank(std::atoi(argv[1]), std::atoi(argv[2]), argv[3][0] == '1');
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
