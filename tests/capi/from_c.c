#define _POSIX_C_SOURCE 200809L
#include "capi/from_c.h"

#include <pthread.h>
#include <string.h>

enum { RANKS = 3, EXPERTS = 5, TOP_K = 2, HIDDEN = 8 };

#define SIZE_OF(type) {#type, sizeof(type)}
const from_c_size from_c_sizes[] = {
    SIZE_OF(ferry_wait_record),
    SIZE_OF(ferry_bad_id),
    SIZE_OF(ferry_bad_source),
    SIZE_OF(ferry_overflow),
    SIZE_OF(ferry_error_record),
    SIZE_OF(ferry_bootstrap),
    SIZE_OF(ferry_format),
    SIZE_OF(ferry_config),
    SIZE_OF(ferry_sizes),
    SIZE_OF(ferry_plan),
    SIZE_OF(ferry_source),
    SIZE_OF(ferry_plan_info),
    SIZE_OF(ferry_tokens),
    SIZE_OF(ferry_rows),
    SIZE_OF(ferry_receive_buffers),
    SIZE_OF(ferry_received_part),
    SIZE_OF(ferry_host_totals),
    SIZE_OF(ferry_dispatch_result),
    SIZE_OF(ferry_dispatch_args),
    SIZE_OF(ferry_epilogue),
    SIZE_OF(ferry_combine_args),
    SIZE_OF(ferry_combine_backward_args),
    SIZE_OF(ferry_route_values_args),
    SIZE_OF(ferry_return_values_args),
    SIZE_OF(ferry_step_metadata),
    SIZE_OF(ferry_dispatch_layout_args),
    SIZE_OF(ferry_metadata_args),
    SIZE_OF(ferry_all_gather_v_args),
    SIZE_OF(ferry_reduce_scatter_v_args),
    SIZE_OF(ferry_max_dispatch_result),
    SIZE_OF(ferry_max_dispatch_args),
    SIZE_OF(ferry_max_combine_args),
    SIZE_OF(ferry_nvfuser_dispatch_result),
    SIZE_OF(ferry_nvfuser_dispatch_args),
    SIZE_OF(ferry_nvfuser_combine_args),
    SIZE_OF(ferry_dispatch_counts_args),
    SIZE_OF(ferry_dispatch_counts_result),
    SIZE_OF(ferry_encoder_call),
    SIZE_OF(ferry_call_options),
    SIZE_OF(ferry_counts),
    SIZE_OF(ferry_topology),
    SIZE_OF(ferry_trace_info),
    SIZE_OF(ferry_trace_partition_args),
    {NULL, 0},
};

// What the bootstrap functions share among the threads.
static pthread_barrier_t barrier;
static char gathered[RANKS][4096];

typedef struct participant {
  int rank;
  int failed_line;
} participant;

static ferry_status wait_for_all(void* user) {
  (void)user;
  pthread_barrier_wait(&barrier);
  return FERRY_OK;
}

static ferry_status gather(const void* mine, void* all, size_t bytes, void* user) {
  const participant* self = user;
  if (bytes > sizeof gathered[0]) return FERRY_UNSUPPORTED;
  memcpy(gathered[self->rank], mine, bytes);
  wait_for_all(user);
  for (int r = 0; r < RANKS; ++r) memcpy((char*)all + (size_t)r * bytes, gathered[r], bytes);
  return wait_for_all(user);
}

#define REQUIRE(condition)        \
  if (!(condition)) {             \
    self->failed_line = __LINE__; \
    break;                        \
  }

// Each rank has one token, and the experts return their inputs, so that y = (sum of the weights) * x.
static ferry_status body(ferry_rank* rank, void* user) {
  participant* self = user;
  ferry_exchange* exchange = NULL;
  do {
    const ferry_config config = {.size = sizeof config,
                                 .experts = EXPERTS,
                                 .top_k = TOP_K,
                                 .hidden = HIDDEN,
                                 .max_tokens = 1,
                                 .format = {.kind = FERRY_FORMAT_FP32},
                                 .combine_type = FERRY_FP32};
    REQUIRE(ferry_rank_index(rank) == self->rank && ferry_rank_size(rank) == RANKS);
    REQUIRE(ferry_exchange_create(rank, &config, &exchange) == FERRY_OK);
    float x[HIDDEN], y[HIDDEN];
    const int64_t ids[TOP_K] = {0, EXPERTS - 1};
    const float weights[TOP_K] = {0.5f, 1.5f};
    for (int i = 0; i < HIDDEN; ++i) x[i] = (float)(self->rank + i), y[i] = -1;

    ferry_dispatch_result rows = {.size = sizeof rows};
    const ferry_dispatch_args dispatch = {.size = sizeof dispatch,
                                          .tokens = {.parts = {x}, .count = 1, .type = FERRY_FP32},
                                          .ids = ids,
                                          .id_type = FERRY_INT64,
                                          .weights = weights,
                                          .result = &rows};
    REQUIRE(ferry_dispatch(exchange, &dispatch) == FERRY_OK);
    REQUIRE(*rows.total == (self->rank == 1 ? 0 : RANKS));
    const ferry_combine_args combine = {.size = sizeof combine,
                                        .outputs = {.data = rows.data, .type = FERRY_FP32},
                                        .result = {.data = y, .type = FERRY_FP32},
                                        .plan = rows.plan,
                                        .row_weights = rows.weight};
    REQUIRE(ferry_combine(exchange, &combine) == FERRY_OK);
    int same = 1;
    for (int i = 0; i < HIDDEN; ++i) same &= y[i] == 2 * x[i];
    REQUIRE(same);
  } while (0);
  ferry_exchange_destroy(exchange);
  return FERRY_OK;
}

static void* participate(void* user) {
  participant* self = user;
  const ferry_bootstrap bootstrap = {.size = sizeof bootstrap,
                                     .rank = self->rank,
                                     .ranks = RANKS,
                                     .all_gather = gather,
                                     .barrier = wait_for_all,
                                     .user = self};
  ferry_group* group = NULL;
  if (ferry_group_custom(&bootstrap, NULL, &group) != FERRY_OK) self->failed_line = __LINE__;
  if (ferry_group_run(group, body, self) != FERRY_OK) self->failed_line = __LINE__;
  ferry_group_destroy(group);
  return NULL;
}

int from_c_run(void) {
  pthread_t threads[RANKS];
  participant all[RANKS];
  int failed_line = 0;
  pthread_barrier_init(&barrier, NULL, RANKS);
  for (int r = 0; r < RANKS; ++r) {
    all[r] = (participant){r, 0};
    if (pthread_create(&threads[r], NULL, participate, &all[r]) != 0) return __LINE__;
  }
  for (int r = 0; r < RANKS; ++r) {
    pthread_join(threads[r], NULL);
    if (all[r].failed_line != 0) failed_line = all[r].failed_line;
  }
  pthread_barrier_destroy(&barrier);
  return failed_line;
}
