// A program for mpirun: the engine `mpi`, without a group. The argument names the test.
#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "backends/collective/window_communicator.hpp"
#include "engine/engine.hpp"
#include "engine/transfers.hpp"
#include "ferry/group.hpp"
#include "group/mpi_library.hpp"

namespace ferry::test {
namespace {

// The seed of all ranks: that of rank 0.
std::uint64_t common_seed() {
  const std::uint64_t mine = seed();
  std::vector<std::uint64_t> all(open_mpi().ranks);
  const auto start = [&](ferry_mpi_operation** operation, char* message) {
    return open_mpi().start_all_gather(&mine, all.data(), sizeof mine, operation, message);
  };
  run_mpi_operation(start, no_check);
  return all[0];
}

void move_bytes() {
  const auto engine = make_mpi_engine();
  FERRY_CHECK(engine->kind() == EngineKind::mpi && !engine->ordered_lanes(), "");
  const std::uint64_t base = common_seed();
  const auto lanes = engine->communicators(1);
  for (std::uint64_t round = 0; round < 100; ++round) {
    const int most = round % 10 == 0 ? 200'000 : 500;  // above and below what MPI sends without a handshake
    exchange_random(*lanes[0], open_mpi().rank, open_mpi().ranks, most, base + round);
  }
}

// The path by which NCCL's ranks of one host exchange call headers.
void move_headers_in_shared_memory() {
  const std::uint64_t base = common_seed();
  Group::mpi().run([&](const Rank& rank) {
    for (int link = 0; link < 2; ++link) {
      const auto headers = collective::make_header_link(rank);
      for (std::uint64_t round = 0; round < 100; ++round) {
        const int most = round % 10 == 0 ? 60'000 : 6144;  // above and below a window
        exchange_random(*headers, rank.index(), rank.size(), most, base + round);
      }
      rank.barrier();
    }
  });
}

// Every rank starts the lanes of two exchanges in an order of its own.
void use_lanes_in_any_order() {
  constexpr int kLanes = 3;
  const auto engine = make_mpi_engine();
  const std::uint64_t base = common_seed();
  auto lanes = engine->communicators(kLanes);
  for (auto& lane : engine->communicators(kLanes)) lanes.push_back(std::move(lane));
  std::vector<std::thread> threads;
  std::vector<std::string> errors(lanes.size());
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const std::size_t lane = (i + static_cast<std::size_t>(open_mpi().rank)) % lanes.size();
    threads.emplace_back([&, lane] {
      try {
        for (std::uint64_t round = 0; round < 20; ++round)
          exchange_random(*lanes[lane], open_mpi().rank, open_mpi().ranks, 5000, base + 1000 * lane + round);
      } catch (const std::exception& error) {
        errors[lane] = error.what();
      }
    });
    if (open_mpi().rank == 0) sleep_seconds(0.01);
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) FERRY_CHECK(error.empty(), error);
}

// A message of several pieces, at offsets that do not fit an int. Only pages that are used take memory.
void send_large_messages() {
  constexpr std::int64_t kOffset = 3LL << 30, kBytes = (64LL << 20) * 2 + 12345;
  const int rank = open_mpi().rank, ranks = open_mpi().ranks;
  const std::size_t mapped = kOffset + kBytes;
  const auto map = [&] {
    void* memory =
        mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    FERRY_CHECK(memory != MAP_FAILED, "mmap");
    return static_cast<std::byte*>(memory);
  };
  std::byte* const send = map();
  std::byte* const receive = map();
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  std::vector<std::int64_t> send_bytes(ranks), receive_bytes(ranks), offsets(ranks, kOffset);
  send_bytes[next] = receive_bytes[previous] = kBytes;
  constexpr std::int64_t kStep = 4099;  // bytes between those that are set and checked
  for (std::int64_t i = 0; i < kBytes; i += kStep) send[kOffset + i] = transfer_byte(1, rank, next, i);
  const auto lanes = make_mpi_engine()->communicators(1);
  lanes[0]->all_to_all_v({send, send_bytes, offsets, receive, receive_bytes, offsets}, nullptr, no_check);
  for (std::int64_t i = 0; i < kBytes; i += kStep)
    FERRY_CHECK(receive[kOffset + i] == transfer_byte(1, previous, rank, i), str("byte ", i));
  munmap(send, mapped);
  munmap(receive, mapped);
}

// Rank 1 does not take part: the others give up in time, and keep the memory.
void miss_a_deadline() {
  const auto lanes = make_mpi_engine()->communicators(1);
  const int rank = open_mpi().rank, ranks = open_mpi().ranks;
  if (rank == 1) return sleep_seconds(2);
  constexpr std::int64_t kBytes = 1 << 20;
  const TransferSizes sizes(ranks, std::vector<std::int64_t>(ranks, kBytes));
  auto transfer = std::make_shared<RankTransfer>(sizes, rank);
  transfer->send_bytes[rank] = transfer->receive_bytes[rank] = 0;
  int checks = 0;
  const Stopwatch watch;
  const auto give_up_after = [&](double seconds) {
    ++checks;
    if (watch.seconds() > seconds) throw TimeoutError("the deadline of the test", {});
  };
  const auto attempt = [&](double seconds) {
    try {
      lanes[0]->all_to_all_v(transfer->arguments(), transfer, [&] { give_up_after(seconds); });
    } catch (const TimeoutError&) {
      return true;
    }
    return false;
  };
  FERRY_CHECK(attempt(0.5), "the transfer ended without rank 1");
  const double lasted = watch.own_seconds();
  FERRY_CHECK(lasted < 1.0, str(lasted, " s"));
  FERRY_CHECK(checks >= 50 * lasted, str(checks, " checks in ", lasted, " s"));  // half of one every 10 ms
  FERRY_CHECK(attempt(1e9), "a failed communicator was used again");
  const std::weak_ptr<RankTransfer> kept = transfer;
  transfer.reset();
  FERRY_CHECK(!kept.expired(), "the memory of an abandoned transfer was freed");
  std::cout << "rank " << rank << " gave up in time\n" << std::flush;
  sleep_seconds(1);  // mpirun ends the others when it sees one exit without MPI_Finalize
}

}  // namespace
}  // namespace ferry::test

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> tests = {
      {"bytes", ferry::test::move_bytes},
      {"headers", ferry::test::move_headers_in_shared_memory},
      {"lanes", ferry::test::use_lanes_in_any_order},
      {"large", ferry::test::send_large_messages},
      {"deadline", ferry::test::miss_a_deadline}};
  try {
    tests.at(argc == 2 ? argv[1] : "(one argument is needed)")();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
