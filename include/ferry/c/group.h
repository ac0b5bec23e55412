// Who takes part: ranks, and how they find one another.
#ifndef FERRY_C_GROUP_H
#define FERRY_C_GROUP_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ferry_group ferry_group;  // all participants
typedef struct ferry_rank ferry_rank;    // one of them

// The caller's own way to meet. Both functions are collective and block; anything but FERRY_OK fails the
// group.
typedef struct ferry_bootstrap {
  size_t size;
  int32_t rank, ranks;  // this one's number, and how many there are
  // Gathers `bytes` bytes of every rank into `all` (ranks * bytes, by rank).
  ferry_status (*all_gather)(const void* mine, void* all, size_t bytes, void* user);
  ferry_status (*barrier)(void* user);
  void* user;  // handed to both
} ferry_bootstrap;

// Each makes a group, to be destroyed by the caller. Ranks as threads, or as forked processes, of this one:
// `nodes` nodes of equally many (0: one node). mpi: this process is a rank of an MPI job; FERRY_UNSUPPORTED
// without the MPI module. custom: this process, or thread, is one rank; all ranks are on this host.
// FERRY_USAGE for numbers that fit no group.
ferry_status ferry_group_threads(int ranks, int nodes, ferry_group** group);
ferry_status ferry_group_processes(int ranks, int nodes, ferry_group** group);
ferry_status ferry_group_mpi(ferry_group** group);
ferry_status ferry_group_custom(const ferry_bootstrap* bootstrap, ferry_group** group);
void ferry_group_destroy(ferry_group* group);  // after ferry_group_run has returned; NULL is allowed

int ferry_group_size(const ferry_group* group);  // ranks; -1 for NULL
// How long collectives of the group itself wait, in seconds (default 30); positive and finite.
ferry_status ferry_group_set_deadline(ferry_group* group, double seconds);

// What a rank does. `rank` is valid until it returns. Anything but FERRY_OK makes this rank lost to the
// others: their waits end with FERRY_PEER_LOST. A failed call's status handed back unchanged takes its
// message and numbers along.
typedef ferry_status (*ferry_body)(ferry_rank* rank, void* user);

// Runs `body` once as every rank this group starts (threads, processes) or as this process's rank (mpi,
// custom) and returns when all have ended, with the error that came first. processes: forks, so call it
// before starting threads; what the body writes to memory stays in the child.
ferry_status ferry_group_run(ferry_group* group, ferry_body body, void* user);

int ferry_rank_index(const ferry_rank* rank);  // this rank's number; -1 for NULL
int ferry_rank_size(const ferry_rank* rank);   // how many ranks the group has; -1 for NULL
// 1 if every rank is a thread of this process, else 0; -1 for NULL.
int ferry_rank_same_process(const ferry_rank* rank);
// Rank = node * local_ranks + local rank.
ferry_status ferry_rank_topology(const ferry_rank* rank, int* nodes, int* local_ranks);

// Collective: block until every rank has called (FERRY_TIMEOUT, FERRY_PEER_LOST when one does not).
// all_gather puts `bytes` bytes of every rank into `all` (ranks * bytes, by rank).
ferry_status ferry_rank_all_gather(const ferry_rank* rank, const void* mine, void* all, size_t bytes);
ferry_status ferry_rank_barrier(const ferry_rank* rank);

#ifdef __cplusplus
}
#endif

#endif
