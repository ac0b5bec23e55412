// Groups: the ranks that work together, how they are started, and how they find each other.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ferry/engine.hpp"
#include "ferry/topology.hpp"

namespace ferry {

/// Communication that the caller's program already has, by which the ranks of a group find each other and, if
/// they are on several hosts, agree on small data. Both functions are collective, block until all ranks have
/// called, and report a failure by throwing.
///
/// Ferry calls them on a thread of its own, one call at a time; they must not call Ferry. A call that does
/// not return before the group's deadline is abandoned: its thread is never waited for.
struct Bootstrap {
  int rank = 0;   ///< number of this rank
  int ranks = 1;  ///< R
  /// Gathers `bytes` bytes from every rank into `all`, which has R * bytes bytes, in rank order.
  std::function<void(const void* mine, void* all, std::size_t bytes)> all_gather;
  std::function<void()> barrier;  ///< returns when every rank has called
  /// Simulates hosts: ranks of one host with different texts are treated as ranks of different hosts. Empty:
  /// the environment variable FERRY_HOST_ID.
  std::string host_id = {};
};

class RankState;

/// One rank of a group. A handle: cheap to copy, valid while the group exists.
///
/// Thread safety: use it from the thread that received it.
class Rank {
 public:
  /// For the library's own use.
  explicit Rank(std::shared_ptr<RankState> state) : state_(std::move(state)) {}

  int index() const;  ///< number of this rank, 0 to R - 1
  int size() const;   ///< R
  const Topology& topology() const;
  bool same_process() const;  ///< whether every rank of the group is a thread of this process

  /// Collective. Gathers `bytes` bytes from every rank into `all`, which has R * bytes bytes, in rank order.
  /// Blocks until every rank has called.
  /// @throws TimeoutError, PeerLostError  a rank did not call before the group's deadline, or is gone
  /// @throws UsageError  on every rank: ranks pass different numbers of bytes, where a barrier passes 0
  void all_gather(const void* mine, void* all, std::size_t bytes) const;
  /// Collective. Blocks until every rank has called. Throws as all_gather().
  void barrier() const;

  /// For the library's own use.
  RankState& state() const { return *state_; }

 private:
  std::shared_ptr<RankState> state_;
};

/// A set of ranks, and the way to run code on each of them. Copies refer to the same group.
class Group {
 public:
  // The constructors are local, apart from mpi(): the ranks meet in run() or join().

  /// `ranks` threads of this process, started by run(). They share memory, whatever `nodes`, which simulates
  /// nodes of equal size.
  /// @throws UsageError  `ranks` below 1, or `nodes` does not divide them
  static Group threads(int ranks, int nodes = 1);
  /// Threads on any nodes, all simulated.
  /// @throws UsageError  `topology` has no rank
  static Group threads(const Topology& topology);

  /// `ranks` processes on this host, forked by run(). Call run() before the program starts threads. Otherwise
  /// as threads().
  static Group processes(int ranks, int nodes = 1);
  static Group processes(const Topology& topology);

  /// This process is one rank of an MPI job that mpirun has started. Collective over the job. MPI is also the
  /// engine of exchanges with the backend `collective`, if it was initialised with MPI_THREAD_SERIALIZED or
  /// MPI_THREAD_MULTIPLE. A program that has not initialised MPI leaves that to Ferry.
  /// @throws UnsupportedError  the MPI module was not found, or MPI has failed
  static Group mpi();

  /// This process is one rank of those that `ferry launch` has started on this host. Local. A process may
  /// have one such group at a time.
  /// @throws UsageError  the process was started otherwise
  static Group launched();

  /// This process (or thread) is one rank, and `bootstrap` connects it with the others, which may be on other
  /// hosts. `engine`: the caller's transport, used by exchanges with the backend `collective`; all ranks
  /// bring one, or none does.
  /// @throws UsageError  a rank outside [0, ranks), or a missing function
  static Group custom(Bootstrap bootstrap, EngineFunctions engine = {});

  int size() const;  ///< R

  /// Runs `body` on every rank that this group starts (threads, processes), or as this process's rank (mpi,
  /// launched, custom: collective). Blocks until all of these have returned.
  ///
  /// A rank whose body throws, or whose process is killed, is lost to the others: their waits end with
  /// PeerLostError.
  ///
  /// If a rank stays silent for longer than the deadline, the waits of the others end with TimeoutError. A
  /// group of processes then kills every process that does not end: a stopped one after 0.5 s, the silent one
  /// after 2 s, others after the deadline and 2 s more. A thread cannot be killed: run() returns when the
  /// thread does.
  /// @throws UnsupportedError  mpi, launched, custom: ranks of several hosts look as if they were on one host
  /// @throws TimeoutError  mpi, launched, custom: the ranks have not met before the group's deadline
  /// @throws the error that occurred first on any rank; its message names that rank. Exceptions that are no
  /// ferry::Error become a std::runtime_error, in which groups of threads nest the original
  /// (std::rethrow_if_nested).
  void run(const std::function<void(Rank)>& body);

  /// Collective. Enters the group as this process's rank, for programs that cannot put their work into one
  /// function (mpi, launched, custom). The rank leaves when the last copy of the handle is destroyed. A
  /// process that exits earlier is lost to the others.
  /// @throws UsageError  the group starts its ranks itself (threads, processes), or this rank has joined and
  /// its handle still exists
  /// @throws UnsupportedError, TimeoutError  as run()
  Rank join();

  /// Local; call it before run() or join(). Sets how long collectives of the group itself wait, in seconds.
  /// Default 30. An exchange waits for `Config::deadline` instead.
  /// @throws UsageError  not positive and finite
  void set_deadline(double seconds);

  /// For the library's own use.
  class Launcher;
  explicit Group(std::shared_ptr<Launcher> launcher) : launcher_(std::move(launcher)) {}

 private:
  std::shared_ptr<Launcher> launcher_;
};

}  // namespace ferry
