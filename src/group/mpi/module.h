/* What the MPI module offers. It is a shared object of its own, loaded on demand, so that Ferry links no MPI.
 */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FERRY_MPI_OPEN "ferry_mpi_open"
#define FERRY_MPI_MESSAGE_BYTES 512

/* All functions return 0, or not 0 with a reason in `message` (FERRY_MPI_MESSAGE_BYTES). */
struct ferry_mpi {
  int rank;
  int ranks;
  int (*all_gather)(const void* mine, void* all, size_t bytes, char* message);
  int (*barrier)(char* message);
};

/* Starts MPI if the program has not, and ends it at exit in that case. Collective over all processes of the
 * job. */
int ferry_mpi_open(struct ferry_mpi* mpi, char* message);
typedef int (*ferry_mpi_open_function)(struct ferry_mpi* mpi, char* message);

#ifdef __cplusplus
}
#endif
