// Calls the libraries above Ferry that have C functions, one of each.
#include <ferry/ferry.h>
#include <stdio.h>

int main(void) {
  const int32_t counts[] = {2, 0, 3};
  const int64_t loads[] = {2, 0, 3};
  uint32_t row_offsets[4];
  int32_t expert_ids[3];
  int number = 0;
  ferry_load_statistics load = {0};
  load.size = sizeof load;
  if (ferry_max_group_index(counts, 3, 1, row_offsets, expert_ids, &number) != FERRY_OK) return 1;
  if (ferry_statistics_of_load(loads, 3, &load) != FERRY_OK) return 1;
  if (ferry_nvfuser_exchange_create(NULL, NULL, NULL) != FERRY_USAGE) return 1;
  printf("%d groups, %d rows, %s\n", number, (int)load.routes, ferry_last_error());
  return 0;
}
