// A program for mpirun: exchanges call summaries between processes, or lets one rank fail.
#include <cstdlib>
#include <iostream>
#include <string>

#include "runtime/channel_support.hpp"

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
}

}  // namespace
}  // namespace ferry::test

int main(int argc, char** argv) {
  try {
    if (argc != 3)
      throw std::invalid_argument("two arguments are needed: exchange or failure, and the number of ranks");
    if (std::string(argv[1]) == "exchange") {
      ferry::test::exchange_summaries(std::atoi(argv[2]));
    } else {
      ferry::test::fail_one_rank();
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
