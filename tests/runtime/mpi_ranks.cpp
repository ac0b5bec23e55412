// A program for mpirun: exchanges call summaries between processes, lets one rank fail, or spans several
// hosts.
#include <signal.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "group/mpi_library.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

void exchange_summaries(int ranks) {
  Group group = Group::mpi();
  FERRY_CHECK(group.size() == ranks, str(group.size()));
  for (int round = 0; round < 2; ++round) {
    group.run([](const Rank& rank) {
      TestLane lane(rank, 30);
      for (int i = 0; i < 200; ++i) lane.exchange();
      rank.barrier();
    });
  }
}

void fail_one_rank() {
  try {
    Group::mpi().run([](const Rank& rank) {
      rank.barrier();
      if (rank.index() == 1) throw UsageError("one too many");
      require_text(expect_thrown<PeerLostError>([&] { rank.barrier(); }),
                   "rank 1 ended by an error: one too many");
    });
  } catch (const UsageError& error) {
    require_text(error, "one too many");
  }
  std::cout << str("rank ", open_mpi().rank, " has its error\n") << std::flush;
}

// `hosts`: the number of hosts, each with the same number of consecutive ranks; 0: two simulated hosts, which
// ranks take in turn.
void gather_over_hosts(int hosts) {
  if (hosts == 0) setenv("FERRY_HOST_ID", open_mpi().rank % 2 == 0 ? "even" : "odd", 1);
  Group group = Group::mpi();
  std::vector<int> nodes;
  for (int rank = 0; rank < group.size(); ++rank)
    nodes.push_back(hosts == 0 ? rank % 2 : rank / (group.size() / hosts));
  const Topology expected(nodes, hosts == 0);
  for (int round = 0; round < 2; ++round) {
    group.run([&](const Rank& rank) {
      FERRY_CHECK(rank.topology() == expected,
                  str("rank ", rank.index(), " sees ", rank.topology().nodes(), " nodes"));
      for (const std::size_t bytes : {0, 1, 4096, 50000}) check_gather(rank, 1, bytes);
      for (int i = 0; i < 200; ++i) rank.barrier();
    });
  }
}

// All ranks call barriers until one fails. Writes the error, and how long the barrier took, to a file of the
// rank in `directory`. In round 20 the rank `victim` (-1: none) is killed.
void lose_a_rank(const std::string& directory, int victim) {
  Group group = Group::mpi();
  group.set_deadline(2);
  const int rank = open_mpi().rank;
  Stopwatch last;
  std::string text;
  try {
    group.run([&](const Rank& self) {
      for (int round = 0;; ++round) {
        if (round == 20) std::ofstream(str(directory, "/started.", rank));
        if (round == 20 && rank == victim) raise(SIGKILL);
        sleep_seconds(0.01);
        last = {};
        self.barrier();
      }
    });
  } catch (const TimeoutError& error) {
    text = str("TimeoutError ", error.what());
  } catch (const PeerLostError& error) {
    text = str("PeerLostError ", error.what());
  } catch (const std::exception& error) {
    text = str("std::exception ", error.what());
  }
  std::ofstream(str(directory, "/error.", rank)) << last.seconds() << " " << text << std::endl;
  sleep_seconds(5);  // mpirun may end the others when it sees one exit
}

}  // namespace
}  // namespace ferry::test

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const auto number = [&](std::size_t index) { return std::stoi(arguments.at(index)); };
  try {
    const std::string& what = arguments.at(0);
    if (what == "exchange") ferry::test::exchange_summaries(number(1));
    if (what == "failure") ferry::test::fail_one_rank();
    if (what == "hosts") ferry::test::gather_over_hosts(number(1));
    if (what == "lose") ferry::test::lose_a_rank(arguments.at(1), number(2));
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
