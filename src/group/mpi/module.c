#include "group/mpi/module.h"

#include <limits.h>
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* MPI counts a message's bytes in an int; longer ones travel in pieces. */
#define PIECE_BYTES ((int64_t)64 << 20)

/* A duplicate of MPI_COMM_WORLD, so that these calls cannot match messages of the program. */
static MPI_Comm communicator = MPI_COMM_NULL;
static int own_rank, rank_count, largest_tag;
static int thread_level = MPI_THREAD_SINGLE; /* of all ranks */

/* Held during every call of MPI unless MPI itself is safe to call from several threads. */
static pthread_mutex_t mpi_mutex = PTHREAD_MUTEX_INITIALIZER;

struct ferry_mpi_operation {
  int count;
  MPI_Request requests[];
};

static void enter_mpi(void) {
  if (thread_level != MPI_THREAD_MULTIPLE) pthread_mutex_lock(&mpi_mutex);
}

static void leave_mpi(void) {
  if (thread_level != MPI_THREAD_MULTIPLE) pthread_mutex_unlock(&mpi_mutex);
}

static int check(int result, const char* call, char* message) {
  if (result == MPI_SUCCESS) return 0;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(result, text, &length);
  snprintf(message, FERRY_MPI_MESSAGE_BYTES, "%s: %s", call, text);
  return 1;
}

static struct ferry_mpi_operation* new_operation(int64_t most_requests, char* message) {
  struct ferry_mpi_operation* made =
      malloc(sizeof(struct ferry_mpi_operation) + (size_t)most_requests * sizeof(MPI_Request));
  if (made == NULL) {
    snprintf(message, FERRY_MPI_MESSAGE_BYTES, "no memory for %lld requests", (long long)most_requests);
  } else {
    made->count = 0;
  }
  return made;
}

static int start_all_gather(const void* mine, void* all, size_t bytes, struct ferry_mpi_operation** operation,
                            char* message) {
  if (bytes > INT_MAX) {
    snprintf(message, FERRY_MPI_MESSAGE_BYTES, "MPI_Iallgather: %zu bytes exceed INT_MAX", bytes);
    return 1;
  }
  struct ferry_mpi_operation* made = new_operation(1, message);
  if (made == NULL) return 1;
  const int count = (int)bytes;
  enter_mpi();
  const int failed =
      check(MPI_Iallgather(mine, count, MPI_BYTE, all, count, MPI_BYTE, communicator, &made->requests[0]),
            "MPI_Iallgather", message);
  leave_mpi();
  if (failed) {
    free(made);
    return 1;
  }
  made->count = 1;
  *operation = made;
  return 0;
}

static int64_t pieces(const int64_t* bytes) {
  int64_t sum = 0;
  for (int peer = 0; peer < rank_count; ++peer) sum += (bytes[peer] + PIECE_BYTES - 1) / PIECE_BYTES;
  return sum;
}

/* Starts to send or receive a message in pieces, which stay in order because they have one tag. */
static int start_message(struct ferry_mpi_operation* operation, int sends, char* memory, int64_t bytes,
                         int peer, int tag, char* message) {
  for (int64_t done = 0; done < bytes; done += PIECE_BYTES) {
    const int64_t left = bytes - done;
    const int part = (int)(left < PIECE_BYTES ? left : PIECE_BYTES);
    MPI_Request* request = &operation->requests[operation->count];
    const int result = sends ? MPI_Isend(memory + done, part, MPI_BYTE, peer, tag, communicator, request)
                             : MPI_Irecv(memory + done, part, MPI_BYTE, peer, tag, communicator, request);
    if (check(result, sends ? "MPI_Isend" : "MPI_Irecv", message) != 0) return 1;
    ++operation->count;
  }
  return 0;
}

/* Every rank begins with the peer after it, so that not all send to rank 0 first. */
static int start_messages(struct ferry_mpi_operation* operation, const struct ferry_mpi_transfer* transfer,
                          int tag, char* message) {
  for (int i = 1; i < rank_count; ++i) {
    const int peer = (own_rank + rank_count - i) % rank_count;
    if (start_message(operation, 0, transfer->receive + transfer->receive_offsets[peer],
                      transfer->receive_bytes[peer], peer, tag, message) != 0)
      return 1;
  }
  for (int i = 1; i < rank_count; ++i) {
    const int peer = (own_rank + i) % rank_count;
    if (start_message(operation, 1, (char*)transfer->send + transfer->send_offsets[peer],
                      transfer->send_bytes[peer], peer, tag, message) != 0)
      return 1;
  }
  return 0;
}

static int start_all_to_all_v(int channel, const struct ferry_mpi_transfer* transfer,
                              struct ferry_mpi_operation** operation, char* message) {
  struct ferry_mpi_operation* made =
      new_operation(pieces(transfer->send_bytes) + pieces(transfer->receive_bytes), message);
  if (made == NULL) return 1;
  /* Tags repeat after so many exchanges that the first of them are gone. */
  const int tag = largest_tag == INT_MAX ? channel : channel % (largest_tag + 1);
  enter_mpi();
  const int failed = start_messages(made, transfer, tag, message);
  leave_mpi();
  if (failed) return 1; /* MPI still knows its requests */
  *operation = made;
  return 0;
}

static int test(struct ferry_mpi_operation* operation, int* done, char* message) {
  enter_mpi();
  const int failed = check(MPI_Testall(operation->count, operation->requests, done, MPI_STATUSES_IGNORE),
                           "MPI_Testall", message);
  leave_mpi();
  if (failed) return 1;
  if (*done) free(operation);
  return 0;
}

static void finalize(void) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized) MPI_Finalize();
}

static int initialize_mpi(struct ferry_mpi* mpi, char* message) {
  int initialized = 0;
  if (check(MPI_Initialized(&initialized), "MPI_Initialized", message) != 0) return 1;
  if (initialized) return 0;
  int provided = 0;
  mpi->finalize = finalize;
  return check(MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread", message);
}

static int to_thread_level(int level) {
  if (level == MPI_THREAD_MULTIPLE) return FERRY_MPI_THREAD_MULTIPLE;
  if (level == MPI_THREAD_SERIALIZED) return FERRY_MPI_THREAD_SERIALIZED;
  if (level == MPI_THREAD_FUNNELED) return FERRY_MPI_THREAD_FUNNELED;
  return FERRY_MPI_THREAD_SINGLE;
}

static int make_communicator(char* message) {
  if (check(MPI_Comm_dup(MPI_COMM_WORLD, &communicator), "MPI_Comm_dup", message) != 0) return 1;
  MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN);
  if (check(MPI_Comm_rank(communicator, &own_rank), "MPI_Comm_rank", message) != 0) return 1;
  if (check(MPI_Comm_size(communicator, &rank_count), "MPI_Comm_size", message) != 0) return 1;
  int *tag = NULL, found = 0;
  if (check(MPI_Comm_get_attr(communicator, MPI_TAG_UB, &tag, &found), "MPI_Comm_get_attr", message) != 0)
    return 1;
  largest_tag = found ? *tag : 32767; /* what MPI guarantees */
  int level = MPI_THREAD_SINGLE;
  if (check(MPI_Query_thread(&level), "MPI_Query_thread", message) != 0) return 1;
  /* MPI's levels are ordered numbers. */
  return check(MPI_Allreduce(&level, &thread_level, 1, MPI_INT, MPI_MIN, communicator), "MPI_Allreduce",
               message);
}

int ferry_mpi_open(struct ferry_mpi* mpi, char* message) {
  if (initialize_mpi(mpi, message) != 0) return 1;
  if (communicator == MPI_COMM_NULL && make_communicator(message) != 0) return 1;
  mpi->rank = own_rank;
  mpi->ranks = rank_count;
  mpi->threads = to_thread_level(thread_level);
  mpi->start_all_gather = start_all_gather;
  mpi->start_all_to_all_v = start_all_to_all_v;
  mpi->test = test;
  return 0;
}
