// Groups: the ranks that work together, how they are started, and how they find each other.
#ifndef FERRY_C_GROUP_H
#define FERRY_C_GROUP_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ferry_group ferry_group;  ///< a set of ranks
typedef struct ferry_rank ferry_rank;    ///< one rank of a group

/// Communication that the caller's program already has, by which the ranks of a group meet and, if they are
/// on several hosts, agree on small data. Both functions are collective and block until all ranks have
/// called. Any status but FERRY_OK fails the group. Ferry calls them on a thread of its own, one call at a
/// time; they must not call Ferry. A call that does not return before the group's deadline is abandoned.
typedef struct ferry_bootstrap {
  size_t size;
  int32_t rank, ranks;  ///< number of this rank, and R
  /// Gathers `bytes` bytes from every rank into `all`, which has R * bytes bytes, in rank order.
  ferry_status (*all_gather)(const void* mine, void* all, size_t bytes, void* user);
  ferry_status (*barrier)(void* user);
  void* user;  ///< passed to both functions
  /// Simulates hosts: ranks of one host with different texts are treated as ranks of different hosts. Read by
  /// ferry_group_custom(). NULL: the environment variable FERRY_HOST_ID.
  const char* host_id;
} ferry_bootstrap;

/// The caller's own transport, used by exchanges with the backend `collective`. Ferry calls these functions
/// on threads of its own. They must not call Ferry: collective calls of the same group and its exchanges
/// return FERRY_USAGE then.
typedef struct ferry_engine_functions {
  size_t size;
  /// Collective over all ranks of the group. Sends `send_bytes[p]` bytes at `send + send_offsets[p]` to rank
  /// p, and receives `receive_bytes[p]` bytes of rank p at `receive + receive_offsets[p]`. Returns when both
  /// buffers may be used again. Any status but FERRY_OK fails the group.
  ///
  /// The arrays are [R], in bytes. What p sends to q is as long as what q receives from p. Entries may be 0,
  /// and this rank's own is always 0. Buffers are host memory and valid until the function returns.
  ///
  /// `lane` is a number that the calls of one lane have on every rank. It counts the lanes of all exchanges
  /// of the group: if the first exchange has two lanes, the second begins with lane 2.
  ferry_status (*all_to_all_v)(int32_t lane, const void* send, const int64_t* send_bytes,
                               const int64_t* send_offsets, void* receive, const int64_t* receive_bytes,
                               const int64_t* receive_offsets, void* user);
  /// Makes every blocked all_to_all_v() of this rank return a status other than FERRY_OK. Called at most
  /// once, from a thread of its own, when a deadline has passed or a peer is lost; the engine is not used
  /// afterwards. NULL, or if a call stays blocked: its thread and buffers are abandoned and never freed.
  void (*abort)(void* user);
  void* user;  ///< passed to both functions
  /// 0: all_to_all_v() is called for one lane at a time, and needs the same order of lanes on all ranks. 1:
  /// it is called for several lanes at once, from a thread for each, and calls of a lane meet whatever the
  /// order of the others.
  int32_t unordered_lanes;
  /// 1: all_to_all_v() also takes buffers in CUDA device memory: see ferry::EngineFunctions::device_memory.
  int32_t device_memory;
} ferry_engine_functions;

// The constructors of a group. The caller destroys it with ferry_group_destroy().

/// `ranks` threads of this process. They share memory, whatever `node_of_rank` [ranks], which simulates
/// nodes: ranks with equal numbers, which may be any, are on one. NULL: all are. FERRY_USAGE: `ranks`
/// below 1.
ferry_status ferry_group_threads(const int32_t* node_of_rank, int ranks, ferry_group** group);
/// `ranks` forked processes; otherwise as ferry_group_threads().
ferry_status ferry_group_processes(const int32_t* node_of_rank, int ranks, ferry_group** group);
/// This process is one rank of an MPI job. FERRY_UNSUPPORTED: the MPI module was not found, or MPI has
/// failed.
ferry_status ferry_group_mpi(ferry_group** group);
/// This process is one rank of those that `ferry launch` has started on this host. FERRY_USAGE: it was
/// started otherwise.
ferry_status ferry_group_launched(ferry_group** group);
/// This process, or thread, is one rank, and `bootstrap` connects it with the others. `engine` may be NULL;
/// all ranks bring one, or none does. What `user` points to must live as long as the group and its exchanges,
/// and for ever if an all_to_all_v() was abandoned.
ferry_status ferry_group_custom(const ferry_bootstrap* bootstrap, const ferry_engine_functions* engine,
                                ferry_group** group);

/// Call it after ferry_group_run() has returned; ranks that have joined stay valid. NULL is allowed.
void ferry_group_destroy(ferry_group* group);

/// R; -1 for NULL.
int ferry_group_size(const ferry_group* group);
/// Sets how long collectives of the group itself wait: positive and finite, in seconds. Default 30.
ferry_status ferry_group_set_deadline(ferry_group* group, double seconds);

/// The code that a rank runs. `rank` is valid until it returns. Any status but FERRY_OK makes this rank lost
/// to the others, whose waits end with FERRY_PEER_LOST. If the body returns the status of a failed call
/// unchanged, that call's message and numbers become the error of the group.
typedef ferry_status (*ferry_body)(ferry_rank* rank, void* user);

/// Runs `body` on every rank that this group starts (threads, processes), or as this process's rank (mpi,
/// launched, custom). Blocks until all have returned. Returns the error that occurred first on any rank.
/// processes: forks, so call it before starting threads; what the body writes to memory stays in the child
/// process.
ferry_status ferry_group_run(ferry_group* group, ferry_body body, void* user);

/// Collective. Enters the group as this process's rank, for programs that cannot put their work into one
/// function (mpi, launched, custom). The caller gives the handle back with ferry_rank_leave(). A process that
/// exits earlier is lost to the others. FERRY_USAGE: the group starts its ranks itself (threads, processes),
/// or this rank has joined already. FERRY_TIMEOUT: the ranks have not met before the group's deadline.
ferry_status ferry_group_join(ferry_group* group, ferry_rank** rank);
/// Destroys a handle of ferry_group_join(). The rank leaves the group when no exchange uses it any more. NULL
/// is allowed.
void ferry_rank_leave(ferry_rank* rank);

int ferry_rank_index(const ferry_rank* rank);  ///< number of this rank, 0 to R - 1; -1 for NULL
int ferry_rank_size(const ferry_rank* rank);   ///< R; -1 for NULL

/// Where the ranks of a group are.
typedef struct ferry_topology {
  size_t size;
  int32_t same_process;  ///< 1: every rank is a thread of this process
  int32_t nodes;         ///< sets of ranks that share memory, numbered in the order of their lowest ranks
} ferry_topology;

/// Local. Also writes the node of every rank to `node_of`, [R], unless it is NULL.
ferry_status ferry_rank_topology(const ferry_rank* rank, ferry_topology* topology, int32_t* node_of);

/// Collective. Gathers `bytes` bytes from every rank into `all`, which has R * bytes bytes, in rank order.
/// Blocks until every rank has called. FERRY_TIMEOUT, FERRY_PEER_LOST: a rank did not call in time, or is
/// gone. FERRY_USAGE on every rank: ranks pass different numbers of bytes, where a barrier passes 0.
ferry_status ferry_rank_all_gather(const ferry_rank* rank, const void* mine, void* all, size_t bytes);
/// Collective. Blocks until every rank has called; statuses as ferry_rank_all_gather().
ferry_status ferry_rank_barrier(const ferry_rank* rank);

#ifdef __cplusplus
}
#endif

#endif
