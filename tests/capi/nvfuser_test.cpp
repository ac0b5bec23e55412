// The call shapes of nvFuser through the C interface: its own case, and what is refused.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "capi/run.hpp"

namespace ferry::capi_test {
namespace {

using NvfuserHandle = std::unique_ptr<ferry_nvfuser_exchange, void (*)(ferry_nvfuser_exchange*)>;
using Numbers = std::vector<std::int64_t>;

NvfuserHandle make_nvfuser(const ferry_rank* rank, int top_k = 1) {
  ferry_config config = small_config();
  config.experts = 4;
  config.top_k = top_k;
  config.hidden = 4;
  config.max_tokens = 4;
  config.format.kind = FERRY_FORMAT_FP32;
  ferry_nvfuser_exchange* exchange = nullptr;
  EXPECT_EQ(ferry_nvfuser_exchange_create(rank, &config, &exchange), FERRY_OK) << ferry_last_error();
  return {exchange, ferry_nvfuser_exchange_destroy};
}

// nvFuser's case: four tokens on each of two ranks, for the experts 0, 2, 3, 2.
struct NvfuserStep {
  explicit NvfuserStep(int rank) {
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<float>(i) + 1000.0f * static_cast<float>(rank);
    dispatch.tokens.parts[0] = x.data();
    dispatch.tokens.count = 4;
    dispatch.tokens.type = FERRY_FP32;
    dispatch.ids = ids.data();
    dispatch.id_type = FERRY_INT64;
    dispatch.result = &received;
  }
  ferry_nvfuser_combine_args combine_args() {
    auto args = sized<ferry_nvfuser_combine_args>();
    args.rows = received.recv_x;
    args.row_count = received.rows;
    args.recv_src_idx = received.recv_src_idx;
    args.recv_src_rank = received.recv_src_rank;
    args.n_tokens_to_rank = received.n_tokens_to_rank;
    args.n_tokens_from_rank = received.n_tokens_from_rank;
    args.tokens = 4;
    args.result = result.data();
    return args;
  }

  std::vector<float> x = std::vector<float>(16), result = std::vector<float>(16, -7);
  Numbers ids = {0, 2, 3, 2};
  ferry_nvfuser_dispatch_result received = sized<ferry_nvfuser_dispatch_result>();
  ferry_nvfuser_dispatch_args dispatch = sized<ferry_nvfuser_dispatch_args>();
};

Numbers values(const std::int64_t* first, std::int64_t count) {
  return {first, first + count};
}

TEST(NvfuserInC, ItsOwnCase) {
  run_threads(2, [](ferry_rank* rank) {
    const NvfuserHandle exchange = make_nvfuser(rank);
    NvfuserStep step(ferry_rank_index(rank));
    ASSERT_EQ(ferry_nvfuser_dispatch(exchange.get(), &step.dispatch), FERRY_OK) << ferry_last_error();
    const ferry_nvfuser_dispatch_result& got = step.received;
    const bool first = ferry_rank_index(rank) == 0;
    const std::int64_t rows = first ? 2 : 6;
    ASSERT_EQ(got.rows, rows);
    EXPECT_EQ(values(got.recv_src_idx, rows), first ? Numbers({0, 0}) : Numbers({1, 3, 1, 3, 2, 2}));
    EXPECT_EQ(values(got.recv_src_rank, rows), first ? Numbers({0, 1}) : Numbers({0, 0, 1, 1, 0, 1}));
    EXPECT_EQ(values(got.recv_topk_idx, rows), first ? Numbers({0, 0}) : Numbers({2, 2, 2, 2, 3, 3}));
    EXPECT_EQ(values(got.n_tokens_to_rank, 2), Numbers({1, 3}));
    EXPECT_EQ(values(got.n_tokens_from_rank, 2), first ? Numbers({1, 1}) : Numbers({3, 3}));
    const auto args = step.combine_args();
    ASSERT_EQ(ferry_nvfuser_combine(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(step.result, step.x);
    std::vector<float> memory(static_cast<std::size_t>(4 * ferry_nvfuser_capacity(exchange.get())));
    step.dispatch.recv_x = memory.data();
    ASSERT_EQ(ferry_nvfuser_dispatch(exchange.get(), &step.dispatch), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(step.received.recv_x, memory.data());
    EXPECT_EQ(memory[0], first ? 0.0f : 4.0f);
  });
}

TEST(NvfuserInC, AResultIsFilledThoughAnIdIsOutOfRange) {
  run_threads(2, [](ferry_rank* rank) {
    const NvfuserHandle exchange = make_nvfuser(rank);
    const bool first = ferry_rank_index(rank) == 0;
    NvfuserStep step(ferry_rank_index(rank));
    if (first) step.ids[1] = 4;
    EXPECT_EQ(ferry_nvfuser_dispatch(exchange.get(), &step.dispatch), first ? FERRY_USAGE : FERRY_OK);
    EXPECT_EQ(step.received.rows, first ? 2 : 5);
    const auto args = step.combine_args();
    ASSERT_EQ(ferry_nvfuser_combine(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    if (first) std::fill_n(step.x.begin() + 4, 4, 0.0f);
    EXPECT_EQ(step.result, step.x);
  });
}

TEST(NvfuserInC, BadArgumentsEndTheCallOnEveryRank) {
  run_threads(2, [](ferry_rank* rank) {
    const NvfuserHandle exchange = make_nvfuser(rank);
    const bool odd = ferry_rank_index(rank) == 1;
    NvfuserStep step(ferry_rank_index(rank));
    auto dispatch = step.dispatch;
    dispatch.id_type = odd ? 9 : FERRY_INT64;
    EXPECT_TRUE(is_refused(ferry_nvfuser_dispatch(exchange.get(), &dispatch), "id_type = 9"));
    ASSERT_EQ(ferry_nvfuser_dispatch(exchange.get(), &step.dispatch), FERRY_OK) << ferry_last_error();
    auto args = step.combine_args();
    if (odd) args.n_tokens_to_rank = nullptr;
    EXPECT_EQ(ferry_nvfuser_combine(exchange.get(), &args), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("rank 1: n_tokens_to_rank has 0 entries, must have 2"))
        << ferry_last_error();
    args = step.combine_args();
    if (odd) args.recv_src_idx = nullptr;
    EXPECT_TRUE(
        is_refused(ferry_nvfuser_combine(exchange.get(), &args), "recv_src_rank has 6 entries, must have 0"));
    args = step.combine_args();
    ASSERT_EQ(ferry_nvfuser_combine(exchange.get(), &args), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(step.result, step.x);
  });
}

}  // namespace
}  // namespace ferry::capi_test
