// Who takes part: ranks, and how they find one another.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace ferry {

// Nodes of equally many ranks: rank = node * local_ranks + local rank.
struct Topology {
  int nodes = 1;
  int local_ranks = 1;

  int ranks() const { return nodes * local_ranks; }
  int node_of(int rank) const { return rank / local_ranks; }
  int local_rank_of(int rank) const { return rank % local_ranks; }
};

// The caller's own way to meet, for programs that already have one. Both functions are collective and block;
// a failure is reported by throwing.
struct Bootstrap {
  int rank = 0;
  int ranks = 1;
  // Gathers `bytes` bytes of every rank into `all` (ranks * bytes, by rank).
  std::function<void(const void* mine, void* all, std::size_t bytes)> all_gather;
  std::function<void()> barrier;
};

class RankState;

// One participant: a handle, cheap to copy, valid while its group lives. Use it from the thread it was given
// to.
class Rank {
 public:
  explicit Rank(std::shared_ptr<RankState> state) : state_(std::move(state)) {}

  int index() const;
  int size() const;
  Topology topology() const;
  bool same_process() const;  // every rank of the group is a thread of this process

  // Collective. Blocks until every rank has called; throws TimeoutError or PeerLostError when one does not.
  void all_gather(const void* mine, void* all, std::size_t bytes) const;
  void barrier() const;

  RankState& state() const { return *state_; }

 private:
  std::shared_ptr<RankState> state_;
};

class Group {
 public:
  // Ranks as threads of this process: run() starts them.
  static Group threads(int ranks, int nodes = 1);

  // Ranks as processes of this host: run() forks them, so call it before starting threads.
  static Group processes(int ranks, int nodes = 1);

  // This process is one rank of an MPI job (started by mpirun); needs the MPI module beside the library.
  static Group mpi();

  // This process (or thread) is one rank, and the caller brings the means to meet. Ranks share this host.
  static Group custom(Bootstrap bootstrap);

  int size() const;

  // Runs `body` once as every rank this group starts (threads, processes) or as this process's rank (mpi,
  // custom), and returns when all of them have ended. A rank that ends by an exception is lost to the others:
  // their waits end with PeerLostError, and run() throws the error that came first. A killed process counts
  // as lost.
  void run(const std::function<void(Rank)>& body);

  // For programs whose life is not one function (mpi, custom): enters as this process's rank, which leaves
  // the group when the last copy of the handle goes. Collective. A process that ends before counts as lost.
  // Throws UsageError for groups that start their ranks themselves.
  Rank join();

  // How long collectives of the group itself wait, in seconds. Default 30.
  void set_deadline(double seconds);

  class Launcher;
  explicit Group(std::shared_ptr<Launcher> launcher) : launcher_(std::move(launcher)) {}

 private:
  std::shared_ptr<Launcher> launcher_;
};

}  // namespace ferry
