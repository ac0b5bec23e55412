#include "harness/engine_ranks.hpp"

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "harness/device.hpp"
#include "harness/thread_engine.hpp"
#include "runtime/support.hpp"

namespace ferry::contract {
namespace {

bool mpi_process_ran = false;
std::unique_ptr<Rank> mpi_member;

// Runs `body` if the ranks have these nodes; `nodes` as for run_mpi_process().
void run_on_nodes(const Rank& rank, const std::vector<int>& nodes, const std::function<void(Rank)>& body) {
  const Topology& topology = rank.topology();
  if (!nodes.empty() && Topology(nodes, topology.simulated()) != topology) return;
  mpi_process_ran = true;
  body(rank);
}

// `host_of`: names the host of a rank.
void run_on_hosts(int ranks, const std::function<std::string(int rank)>& host_of,
                  const std::function<void(Rank)>& body, bool device_memory = false) {
  const test::TestBootstrap meeting(ranks);
  const test::ThreadEngine engine =
      device_memory ? test::ThreadEngine(ranks, false, device::copy) : test::ThreadEngine(ranks);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Bootstrap bootstrap = meeting.bootstrap(rank);
        bootstrap.host_id = host_of(rank);
        Group group = Group::custom(bootstrap, engine.functions(rank));
        group.set_deadline(meeting_deadline(ranks));
        group.run(body);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace

double meeting_deadline(int ranks) {
  return 30 + 0.25 * ranks;
}

void run_engine_threads(int ranks, const std::function<void(Rank)>& body, bool device_memory) {
  run_on_hosts(ranks, [](int) { return std::string(); }, body, device_memory);
}

void run_engine_nodes(const Topology& topology, const std::function<void(Rank)>& body, bool device_memory) {
  const auto host_of = [&](int rank) { return "host " + std::to_string(topology.node_of(rank)); };
  run_on_hosts(topology.ranks(), host_of, body, device_memory);
}

void run_engine_hosts(int ranks, const std::function<void(Rank)>& body) {
  run_on_hosts(ranks, [](int rank) { return std::string(rank % 3 == 1 ? "second" : "first"); }, body);
}

void run_mpi_process(int ranks, const std::vector<int>& nodes, const std::function<void(Rank)>& body) {
  Group group = Group::mpi();
  if (group.size() != ranks) return;
  group.run([&](const Rank& rank) { run_on_nodes(rank, nodes, body); });
}

void run_mpi_member(int ranks, const std::vector<int>& nodes, const std::function<void(Rank)>& body) {
  if (!mpi_member) mpi_member = std::make_unique<Rank>(Group::mpi().join());
  if (mpi_member->size() == ranks) run_on_nodes(*mpi_member, nodes, body);
}

void leave_mpi_group() {
  mpi_member = nullptr;
}

bool take_mpi_process_ran() {
  return std::exchange(mpi_process_ran, false);
}

}  // namespace ferry::contract
