// Eight ranks send their tokens to experts that double them, and sum what returns.
#include <ferry/ferry.h>
#include <stdio.h>

enum { RANKS = 8, TOKENS = 4, HIDDEN = 8, TOP_K = 2 };

static ferry_status step(ferry_rank* rank, ferry_exchange* exchange) {
  const int32_t ids[TOKENS * TOP_K] = {0, 15, 3, 8, 7, 2, 9, 4};  // two experts a token
  float tokens[TOKENS * HIDDEN], result[TOKENS * HIDDEN], weights[TOKENS * TOP_K];
  for (int i = 0; i < TOKENS * HIDDEN; ++i) tokens[i] = 1.0f + (float)ferry_rank_index(rank);
  for (int i = 0; i < TOKENS * TOP_K; ++i) weights[i] = 0.25f;

  ferry_dispatch_result rows = {.size = sizeof rows};
  const ferry_dispatch_args dispatch = {.size = sizeof dispatch,
                                        .tokens = {.parts = {tokens}, .count = TOKENS, .type = FERRY_FP32},
                                        .ids = ids,
                                        .weights = weights,
                                        .result = &rows};
  ferry_status status = ferry_dispatch(exchange, &dispatch);
  if (status != FERRY_OK) return status;
  float* values = rows.data;
  for (int i = 0; i < *rows.total * HIDDEN; ++i) values[i] *= 2;  // the experts
  const ferry_combine_args combine = {.size = sizeof combine,
                                      .outputs = {.data = values, .type = FERRY_FP32},
                                      .result = {.data = result, .type = FERRY_FP32},
                                      .plan = rows.plan,
                                      .row_weights = rows.weight};
  status = ferry_combine(exchange, &combine);
  for (int r = 0; r < RANKS && status == FERRY_OK; ++r) {  // print in rank order
    if (r == ferry_rank_index(rank))
      printf("rank %d: %d rows received, y = %g\n", r, (int)*rows.total, (double)result[0]);
    status = ferry_rank_barrier(rank);
  }
  return status;
}

static ferry_status body(ferry_rank* rank, void* user) {
  const ferry_config* config = user;
  ferry_exchange* exchange = NULL;
  ferry_status status = ferry_exchange_create(rank, config, &exchange);
  if (status == FERRY_OK) status = step(rank, exchange);
  ferry_exchange_destroy(exchange);
  return status;
}

int main(void) {
  ferry_config config = {.size = sizeof config,
                         .experts = 16,
                         .top_k = TOP_K,
                         .hidden = HIDDEN,
                         .max_tokens = TOKENS,
                         .format = {.kind = FERRY_FORMAT_FP32},
                         .combine_type = FERRY_FP32};
  ferry_group* group = NULL;
  ferry_status status = ferry_group_threads(NULL, RANKS, &group);
  if (status == FERRY_OK) status = ferry_group_run(group, body, &config);
  ferry_group_destroy(group);
  if (status != FERRY_OK) fprintf(stderr, "%s: %s\n", ferry_status_name(status), ferry_last_error());
  return status == FERRY_OK ? 0 : 1;
}
