// A program for mpirun that initialises MPI itself, with the thread level in its argument: the engine `mpi`
// says which level it needs, or works.
#include <mpi.h>

#include <cstdlib>
#include <iostream>
#include <thread>

#include "engine/engine.hpp"
#include "engine/transfers.hpp"
#include "ferry/exchange.hpp"
#include "group/mpi_library.hpp"
#include "runtime/channel_support.hpp"

namespace ferry::test {
namespace {

void use_engine(int level) {
  const auto engine = make_mpi_engine();
  if (level < MPI_THREAD_SERIALIZED) {
    const auto error = expect_thrown<UnsupportedError>([&] { engine->communicators(1); });
    require_text(error, level == MPI_THREAD_SINGLE ? "initialised with MPI_THREAD_SINGLE"
                                                   : "initialised with MPI_THREAD_FUNNELED");
    require_text(error, "call MPI_Init_thread with MPI_THREAD_MULTIPLE");
    Group::mpi().run([](const Rank& rank) {
      rank.barrier();  // groups need no threads
      const auto refused = expect_thrown<UnsupportedError>([&] {
        Exchange exchange(
            rank,
            {.experts = 4, .top_k = 1, .hidden = 64, .max_tokens = 4, .backend = BackendKind::collective});
      });
      require_text(refused, "call MPI_Init_thread with MPI_THREAD_MULTIPLE");
    });
    return;
  }
  const auto lanes = engine->communicators(2);
  std::thread other([&] {
    for (std::uint64_t round = 0; round < 50; ++round)
      exchange_random(*lanes[1], open_mpi().rank, open_mpi().ranks, 50'000, 1000 + round);
  });
  for (std::uint64_t round = 0; round < 50; ++round)
    exchange_random(*lanes[0], open_mpi().rank, open_mpi().ranks, 50'000, round);
  other.join();
}

}  // namespace
}  // namespace ferry::test

int main(int argc, char** argv) {
  int provided = 0, rank = 0;
  MPI_Init_thread(&argc, &argv, argc == 2 ? std::atoi(argv[1]) : MPI_THREAD_SINGLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int status = 0;
  try {
    // The level that counts is the lowest of all ranks, which this MPI may have raised.
    ferry::test::use_engine(provided);
  } catch (const std::exception& error) {
    std::cerr << "rank " << rank << ": " << error.what() << "\n";
    status = 1;
  }
  MPI_Finalize();
  return status;
}
