/* Interface of the MPI module: a shared object loaded on demand, so that Ferry itself does not link MPI. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FERRY_MPI_OPEN "ferry_mpi_open"
#define FERRY_MPI_MESSAGE_BYTES 512

/* MPI's thread levels, in its order. */
enum ferry_mpi_threads {
  FERRY_MPI_THREAD_SINGLE = 0,
  FERRY_MPI_THREAD_FUNNELED = 1,
  FERRY_MPI_THREAD_SERIALIZED = 2,
  FERRY_MPI_THREAD_MULTIPLE = 3
};

/* An operation that has been started and has not ended. */
struct ferry_mpi_operation;

/* What this rank sends to and receives from every rank: lists of one entry for each rank, in bytes. */
struct ferry_mpi_transfer {
  const char* send;
  const int64_t* send_bytes;
  const int64_t* send_offsets;
  char* receive;
  const int64_t* receive_bytes;
  const int64_t* receive_offsets;
};

/* Functions that return an int return 0 on success. Otherwise they write the reason to `message`
 * (FERRY_MPI_MESSAGE_BYTES).
 *
 * Operations are started, then tested until they are done; memory that they use must be valid until then.
 * From FERRY_MPI_THREAD_SERIALIZED on, different threads may call these functions at once. */
struct ferry_mpi {
  int rank;
  int ranks;
  enum ferry_mpi_threads threads; /* the lowest level of all ranks */

  /* Collective. Gathers `bytes` bytes of every rank; a barrier is one of 0 bytes. */
  int (*start_all_gather)(const void* mine, void* all, size_t bytes, struct ferry_mpi_operation** operation,
                          char* message);

  /* Collective. Matches only calls with the same channel; of these, the n-th of every rank match. The lists
   * of `transfer` may be freed when it returns. */
  int (*start_all_to_all_v)(int channel, const struct ferry_mpi_transfer* transfer,
                            struct ferry_mpi_operation** operation, char* message);

  /* Never blocks. The operation is freed when it is done. After a failure, and of an operation that is given
   * up, MPI may use the memory until the process ends, so the memory must never be freed. */
  int (*test)(struct ferry_mpi_operation* operation, int* done, char* message);

  /* Finalises MPI: collective over all processes of the job, without a deadline. NULL: the program does it.
   */
  void (*finalize)(void); /* NOLINT(modernize-redundant-void-arg): C */
};

/* Fills in `mpi`, which is zero. Initialises MPI with FERRY_MPI_THREAD_MULTIPLE if the program has not
 * initialised it. Collective over all processes of the job. */
int ferry_mpi_open(struct ferry_mpi* mpi, char* message);
typedef int (*ferry_mpi_open_function)(struct ferry_mpi* mpi, char* message);

#ifdef __cplusplus
}
#endif
