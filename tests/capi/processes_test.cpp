// Ranks that are processes. A program of its own, because it forks, and must do so before any thread is
// started.
#include "capi/run.hpp"

namespace ferry::capi_test {
namespace {

GroupHandle processes(int ranks) {
  ferry_group* group = nullptr;
  EXPECT_EQ(ferry_group_processes(nullptr, ranks, &group), FERRY_OK) << ferry_last_error();
  return {group, ferry_group_destroy};
}

// A failed EXPECT in a child process would not be reported, so bodies report through their status.
TEST(Processes, Dispatch) {
  const auto body = [](ferry_rank* rank, void*) -> ferry_status {
    auto topology = sized<ferry_topology>();
    if (ferry_rank_topology(rank, &topology, nullptr) != FERRY_OK) return FERRY_OTHER;
    if (topology.same_process != 0) return FERRY_OTHER;
    const ferry_config config = small_config();
    const ExchangeHandle exchange = make_exchange(rank, config);
    alignas(16) std::uint16_t values[256] = {};
    const std::int32_t ids[] = {0, 4, 9};
    auto rows = sized<ferry_dispatch_result>();
    auto args = sized<ferry_dispatch_args>();
    args.tokens.parts[0] = values;
    args.tokens.count = 1;
    args.ids = ids;
    args.result = &rows;
    const ferry_status status = ferry_dispatch(exchange.get(), &args);
    if (status != FERRY_OK) return status;
    return *rows.total == (ferry_rank_index(rank) == 0 ? 4 : 2) ? FERRY_OK : FERRY_OTHER;
  };
  EXPECT_EQ(ferry_group_run(processes(2).get(), body, nullptr), FERRY_OK) << ferry_last_error();
}

TEST(Processes, ErrorsReachTheParentWithTheirNumbers) {
  const auto body = [](ferry_rank* rank, void*) -> ferry_status {
    const ferry_config config = small_config();
    const ExchangeHandle exchange = make_exchange(rank, config);
    alignas(16) std::uint16_t values[256] = {};
    const std::int32_t ids[] = {0, 4, ferry_rank_index(rank) == 1 ? 77 : 9};
    auto args = sized<ferry_dispatch_args>();
    args.tokens.parts[0] = values;
    args.tokens.count = 1;
    args.ids = ids;
    return ferry_dispatch(exchange.get(), &args);
  };
  EXPECT_EQ(ferry_group_run(processes(2).get(), body, nullptr), FERRY_USAGE);
  const ferry_error_record record = last_record();
  ASSERT_EQ(record.kind, FERRY_RECORD_BAD_ID) << ferry_last_error();
  EXPECT_EQ(record.bad_id.rank, 1);
  EXPECT_EQ(record.bad_id.slot, 2);
  EXPECT_EQ(record.bad_id.id, 77);
}

}  // namespace
}  // namespace ferry::capi_test
