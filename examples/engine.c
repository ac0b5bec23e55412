// The shape of an inference engine: the process joins once, runs steps with varying numbers of tokens, and
// leaves.
//
//   ferry launch -n 4 engine
#include <ferry/ferry.h>
#include <stdio.h>
#include <stdlib.h>

enum { EXPERTS = 8, TOP_K = 2, HIDDEN = 16, MOST_TOKENS = 8, STEPS = 3 };

// Ends the process with the library's message. The peers' calls then end with FERRY_PEER_LOST.
static void require(ferry_status status) {
  if (status == FERRY_OK) return;
  fprintf(stderr, "%s: %s\n", ferry_status_name(status), ferry_last_error());
  exit(1);
}

// One layer of one step: the token's experts multiply it by 2. Returns the largest error of the result.
static float layer(ferry_exchange* exchange, int rank, int tokens) {
  float x[MOST_TOKENS * HIDDEN], y[MOST_TOKENS * HIDDEN], weights[MOST_TOKENS * TOP_K];
  int32_t ids[MOST_TOKENS * TOP_K];
  for (int i = 0; i < tokens * HIDDEN; ++i) x[i] = (float)(rank + i % 5);
  for (int i = 0; i < tokens * TOP_K; ++i) {
    ids[i] = (rank + 3 * i) % EXPERTS;
    weights[i] = 1.0f / TOP_K;
  }

  ferry_dispatch_result rows = {.size = sizeof rows};
  const ferry_dispatch_args dispatch = {.size = sizeof dispatch,
                                        .tokens = {.parts = {x}, .count = tokens, .type = FERRY_FP32},
                                        .ids = ids,
                                        .weights = weights,
                                        .result = &rows};
  require(ferry_dispatch(exchange, &dispatch));
  float* values = rows.data;
  for (int64_t i = 0; i < *rows.total * HIDDEN; ++i) values[i] *= 2;
  const ferry_combine_args combine = {.size = sizeof combine,
                                      .outputs = {.data = values, .type = FERRY_FP32},
                                      .result = {.data = y, .type = FERRY_FP32},
                                      .plan = rows.plan,
                                      .row_weights = rows.weight};
  require(ferry_combine(exchange, &combine));

  float worst = 0;
  for (int i = 0; i < tokens * HIDDEN; ++i) {
    const float error = y[i] > 2 * x[i] ? y[i] - 2 * x[i] : 2 * x[i] - y[i];
    if (error > worst) worst = error;
  }
  return worst;
}

int main(void) {
  ferry_group* group = NULL;
  ferry_rank* rank = NULL;
  ferry_exchange* exchange = NULL;
  require(ferry_group_launched(&group));
  require(ferry_group_join(group, &rank));
  const ferry_config config = {.size = sizeof config,
                               .experts = EXPERTS,
                               .top_k = TOP_K,
                               .hidden = HIDDEN,
                               .max_tokens = MOST_TOKENS,
                               .format = {.kind = FERRY_FORMAT_FP32},
                               .combine_type = FERRY_FP32};
  require(ferry_exchange_create(rank, &config, &exchange));

  const int me = ferry_rank_index(rank), ranks = ferry_rank_size(rank);
  for (int step = 0; step < STEPS; ++step) {
    const int tokens = (me + step) % ranks;  // a rank may have none
    const ferry_step_metadata* all = NULL;
    const ferry_metadata_args count = {.size = sizeof count, .count = tokens, .metadata = &all};
    require(ferry_metadata(exchange, &count));
    const float error = layer(exchange, me, tokens);
    if (me == 0) printf("step %d: %d tokens on %d ranks, error %g\n", step, all->sum, ranks, (double)error);
  }

  ferry_exchange_destroy(exchange);
  ferry_rank_leave(rank);
  ferry_group_destroy(group);
  return 0;
}
