/* Interface of the MPI module: a shared object loaded on demand, so that Ferry itself does not link MPI. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FERRY_MPI_OPEN "ferry_mpi_open"
#define FERRY_MPI_MESSAGE_BYTES 512

/* All functions return 0 on success. Otherwise they write the reason to `message` (FERRY_MPI_MESSAGE_BYTES).
 */
struct ferry_mpi {
  int rank;
  int ranks;
  int (*all_gather)(const void* mine, void* all, size_t bytes, char* message);
  int (*barrier)(char* message);
};

/* Fills in `mpi`. Initialises MPI if the program has not, and then finalises it at exit. Collective over all
 * processes of the job. */
int ferry_mpi_open(struct ferry_mpi* mpi, char* message);
typedef int (*ferry_mpi_open_function)(struct ferry_mpi* mpi, char* message);

#ifdef __cplusplus
}
#endif
