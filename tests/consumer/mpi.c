// Ranks of an MPI job: the library finds the MPI module in the folder where it is installed.
#include <ferry/ferry.h>
#include <stdio.h>

static ferry_status body(ferry_rank* rank, void* user) {
  (void)user;
  printf("rank %d of %d\n", ferry_rank_index(rank), ferry_rank_size(rank));
  return FERRY_OK;
}

int main(void) {
  ferry_group* group = NULL;
  ferry_status status = ferry_group_mpi(&group);
  if (status == FERRY_OK) status = ferry_group_run(group, body, NULL);
  ferry_group_destroy(group);
  if (status != FERRY_OK) fprintf(stderr, "%s\n", ferry_last_error());
  return status == FERRY_OK ? 0 : 1;
}
