#include "group/mpi/module.h"

#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

/* A duplicate of MPI_COMM_WORLD, so that these calls cannot match messages of the program. */
static MPI_Comm communicator = MPI_COMM_NULL;

static int check(int result, const char* call, char* message) {
  if (result == MPI_SUCCESS) return 0;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(result, text, &length);
  snprintf(message, FERRY_MPI_MESSAGE_BYTES, "%s: %s", call, text);
  return 1;
}

static int all_gather(const void* mine, void* all, size_t bytes, char* message) {
  if (bytes > INT_MAX) {
    snprintf(message, FERRY_MPI_MESSAGE_BYTES, "MPI_Allgather: %zu bytes exceed INT_MAX", bytes);
    return 1;
  }
  const int count = (int)bytes;
  return check(MPI_Allgather(mine, count, MPI_BYTE, all, count, MPI_BYTE, communicator), "MPI_Allgather",
               message);
}

static int barrier(char* message) {
  return check(MPI_Barrier(communicator), "MPI_Barrier", message);
}

static void finalize_mpi(void) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized) MPI_Finalize();
}

static int initialize_mpi(char* message) {
  int initialized = 0;
  if (check(MPI_Initialized(&initialized), "MPI_Initialized", message) != 0) return 1;
  if (initialized) return 0;
  int provided = 0;
  if (check(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread", message) != 0)
    return 1;
  return atexit(finalize_mpi);
}

int ferry_mpi_open(struct ferry_mpi* mpi, char* message) {
  if (initialize_mpi(message) != 0) return 1;
  if (communicator == MPI_COMM_NULL) {
    if (check(MPI_Comm_dup(MPI_COMM_WORLD, &communicator), "MPI_Comm_dup", message) != 0) return 1;
    MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN);
  }
  if (check(MPI_Comm_rank(communicator, &mpi->rank), "MPI_Comm_rank", message) != 0) return 1;
  if (check(MPI_Comm_size(communicator, &mpi->ranks), "MPI_Comm_size", message) != 0) return 1;
  mpi->all_gather = all_gather;
  mpi->barrier = barrier;
  return 0;
}
