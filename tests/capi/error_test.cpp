// Every kind of error: its status, message and numbers, and the state of the exchange afterwards.
#include "ferry/error.hpp"

#include <cerrno>
#include <chrono>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "capi/convert.hpp"
#include "capi/run.hpp"
#include "harness/guarded_buffer.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::capi_test {
namespace {

// An exchange with one token on this rank, for experts 0, 1 and 2.
struct OneToken {
  OneToken(ferry_rank* rank, const ferry_config& config) : exchange(make_exchange(rank, config)) {
    args.tokens.parts[0] = values;
    args.tokens.count = 1;
    args.ids = ids;
    args.result = &rows;
  }

  ferry_status dispatch() { return ferry_dispatch(exchange.get(), &args); }

  ExchangeHandle exchange;
  alignas(16) std::uint16_t values[256] = {}, sums[256] = {};
  alignas(16) std::uint16_t outputs[9 * 256] = {};  // of the three ranks' routes
  std::int32_t ids[3] = {0, 1, 2};
  ferry_dispatch_result rows = sized<ferry_dispatch_result>();
  ferry_dispatch_args args = sized<ferry_dispatch_args>();
};

TEST(Errors, HaveTheCodesOfTheCppInterface) {
  EXPECT_EQ(FERRY_OK, static_cast<int>(ErrorCode::ok));
  EXPECT_EQ(FERRY_USAGE, static_cast<int>(ErrorCode::usage));
  EXPECT_EQ(FERRY_OVERFLOW, static_cast<int>(ErrorCode::overflow));
  EXPECT_EQ(FERRY_TIMEOUT, static_cast<int>(ErrorCode::timeout));
  EXPECT_EQ(FERRY_PEER_LOST, static_cast<int>(ErrorCode::peer_lost));
  EXPECT_EQ(FERRY_SYSTEM, static_cast<int>(ErrorCode::system));
  EXPECT_EQ(FERRY_UNSUPPORTED, static_cast<int>(ErrorCode::unsupported));
  EXPECT_EQ(FERRY_BARRIER, static_cast<int>(Operation::barrier));
  for (int status = FERRY_OK; status <= FERRY_UNSUPPORTED; ++status) {
    EXPECT_STREQ(ferry_status_name(status), to_string(static_cast<ErrorCode>(status)));
  }
  EXPECT_STREQ(ferry_status_name(FERRY_OTHER), "other");
  EXPECT_STREQ(ferry_status_name(7), "other");
}

TEST(Errors, OfTheStandardLibraryHaveAStatus) {
  EXPECT_EQ(capi::guarded([] { throw std::bad_alloc(); }), FERRY_SYSTEM);
  EXPECT_EQ(last_record().kind, FERRY_RECORD_SYSTEM);
  EXPECT_EQ(last_record().error_number, ENOMEM);
  EXPECT_EQ(capi::guarded([] { throw std::system_error(EMFILE, std::generic_category(), "files"); }),
            FERRY_SYSTEM);
  EXPECT_EQ(last_record().error_number, EMFILE);
  EXPECT_TRUE(last_error_contains("files"));
  EXPECT_EQ(capi::guarded([] { throw std::logic_error("odd"); }), FERRY_OTHER);
  EXPECT_STREQ(ferry_last_error(), "odd");
  EXPECT_EQ(capi::guarded([] { throw 5; }), FERRY_OTHER);
  EXPECT_EQ(last_record().status, FERRY_OTHER);
  EXPECT_EQ(last_record().kind, FERRY_RECORD_NONE);
  EXPECT_EQ(capi::guarded([] {}), FERRY_OK);
  EXPECT_EQ(last_record().status, FERRY_OTHER) << "a successful call must not change the last error";
}

TEST(Errors, BelongToTheirThread) {
  EXPECT_EQ(ferry_group_set_deadline(nullptr, 1), FERRY_USAGE);
  std::thread([] {
    EXPECT_STREQ(ferry_last_error(), "");
    EXPECT_EQ(last_record().status, FERRY_OK);
  }).join();
  EXPECT_TRUE(last_error_contains("group is NULL"));
}

// A call that one rank refuses, in the C++ interface or before, ends on every rank. The next call works.
TEST(Errors, RefusalsReachThePeers) {
  run_threads(3, [&](ferry_rank* rank) {
    OneToken one(rank, small_config());
    const bool refuses = ferry_rank_index(rank) == 1;
    const auto refused = [&](auto change, const std::string& what) {
      const ferry_dispatch_args good = one.args;
      if (refuses) change(one.args);
      EXPECT_TRUE(is_refused(one.dispatch(), what));
      EXPECT_TRUE(refuses || last_error_contains("rank 1 refused dispatch"));
      EXPECT_EQ(one.rows.total, nullptr) << what;
      one.args = good;
      ASSERT_EQ(one.dispatch(), FERRY_OK) << what << ": " << ferry_last_error();
    };
    ASSERT_EQ(one.dispatch(), FERRY_OK) << ferry_last_error();
    const ferry_plan plan = one.rows.plan;
    refused([](auto& args) { args.tokens.count = 8; }, "8 tokens on rank 1, max_tokens is 7");
    refused([](auto& args) { args.id_type = 2; }, "id_type = 2, must be FERRY_INT32 (0) or FERRY_INT64 (1)");
    refused([](auto& args) { args.tokens.type = 3; },
            "ferry_tokens.type = 3, must be FERRY_BF16 (0), FERRY_FP16 (1) or FERRY_FP32 (2)");
    refused([](auto& args) { args.format.kind = 10; },
            "ferry_format.kind = 10, must be FERRY_FORMAT_DEFAULT (0), ");
    refused([&](auto& args) { args.plan = plan; }, "ids and a plan exclude each other");

    auto combine = sized<ferry_combine_args>();
    combine.plan = one.rows.plan;
    combine.outputs.data = one.outputs;
    combine.result.data = one.sums;
    combine.reduction = refuses ? 4 : FERRY_PARTIAL;
    EXPECT_TRUE(is_refused(ferry_combine(one.exchange.get(), &combine),
                           "reduction = 4, must be FERRY_REDUCTION_DEFAULT (0), FERRY_PARTIAL (1), "
                           "FERRY_EXACT (2) or FERRY_UNREDUCED (3)"));
    ASSERT_EQ(one.dispatch(), FERRY_OK) << ferry_last_error();

    const ferry_step_metadata* metadata = nullptr;
    auto step = sized<ferry_metadata_args>();
    step.metadata = refuses ? nullptr : &metadata;
    EXPECT_TRUE(is_refused(ferry_metadata(one.exchange.get(), &step), "metadata is NULL"));
    ASSERT_EQ(one.dispatch(), FERRY_OK) << ferry_last_error();
  });
}

TEST(Errors, ARefusedConfigurationReachesThePeers) {
  run_threads(3, [&](ferry_rank* rank) {
    const bool refuses = ferry_rank_index(rank) == 2;
    ferry_config config = small_config();
    ferry_exchange* exchange = nullptr;
    if (refuses) config.layout = 8;
    EXPECT_TRUE(is_refused(ferry_exchange_create(rank, &config, &exchange),
                           "ferry_config.layout = 8, must be FERRY_EXPERT_MAJOR (0), "
                           "FERRY_EXPERT_PADDED (1), FERRY_RANK_MAJOR (2) or FERRY_EXPERT_INDEXED (3)"));
    EXPECT_TRUE(refuses || last_error_contains("rank 2 refused"));
    EXPECT_EQ(exchange, nullptr);
    EXPECT_TRUE(is_refused(ferry_exchange_create(rank, refuses ? nullptr : &config, &exchange),
                           "ferry_config is NULL"));
    config = small_config();
    config.hidden += refuses ? 8 : 0;
    EXPECT_TRUE(is_refused(ferry_exchange_create(rank, &config, &exchange),
                           "hidden is 256 on rank 0 and 264 on rank 2"));
    make_exchange(rank, small_config());
  });
}

TEST(Errors, ABadScaleIsReportedWithTheReceivedRows) {
  run_threads(2, [&](ferry_rank* rank) {
    OneToken one(rank, small_config());
    ASSERT_EQ(ferry_parse_format("nvfp4", &one.args.format), FERRY_OK);
    const float g = -1;
    one.args.global_scale = &g;
    EXPECT_TRUE(is_refused(one.dispatch(), "global_scale = -1"));
    ASSERT_NE(one.rows.total, nullptr);
    EXPECT_EQ(*one.rows.total, ferry_rank_index(rank) == 0 ? 6 : 0);
    one.args.call.lane = 9;  // a refused call has no result
    EXPECT_EQ(one.dispatch(), FERRY_USAGE);
    EXPECT_EQ(one.rows.total, nullptr);
    EXPECT_TRUE(is_refused(ferry_check(one.exchange.get(), 1), "lane 1"));
  });
}

TEST(Errors, BadSourcesAreReported) {
  run_threads(1, [&](ferry_rank* rank) {
    OneToken one(rank, small_config());
    ASSERT_EQ(one.dispatch(), FERRY_OK) << ferry_last_error();
    const ferry_plan plan = one.rows.plan;
    contract::GuardedBuffer copy(static_cast<std::int64_t>(plan.bytes));
    ASSERT_EQ(ferry_plan_copy(&plan, copy.data(), plan.bytes, &one.args.plan), FERRY_OK);
    view_plan(copy.data(), static_cast<PlanHeader*>(plan.storage)->shape).counts[2] = 1 << 30;
    one.args.ids = nullptr;
    EXPECT_EQ(one.dispatch(), FERRY_USAGE);
    const ferry_error_record record = last_record();
    ASSERT_EQ(record.kind, FERRY_RECORD_BAD_SOURCE) << ferry_last_error();
    EXPECT_EQ(record.bad_source.rank, 0);
    EXPECT_EQ(record.bad_source.index, 2);
    EXPECT_EQ(record.bad_source.count, 1);
    EXPECT_NE(one.rows.total, nullptr);
  });
}

TEST(Errors, ATimeoutNamesWhoWaitedForWhom) {
  ferry_config config = small_config();
  config.deadline = 0.2;
  run_threads(2, [&](ferry_rank* rank) {
    OneToken one(rank, config);
    ASSERT_EQ(one.dispatch(), FERRY_OK) << ferry_last_error();
    if (ferry_rank_index(rank) == 1) std::this_thread::sleep_for(std::chrono::milliseconds(900));
    EXPECT_EQ(one.dispatch(), FERRY_TIMEOUT);
    const ferry_error_record record = last_record();
    EXPECT_EQ(record.status, FERRY_TIMEOUT);
    ASSERT_EQ(record.kind, FERRY_RECORD_WAIT);
    EXPECT_EQ(one.rows.total, nullptr);
    if (ferry_rank_index(rank) == 1) return;  // the late rank waited for no peer
    EXPECT_EQ(record.wait.operation, FERRY_DISPATCH);
    EXPECT_EQ(record.wait.rank, 0);
    EXPECT_EQ(record.wait.peer, 1);
    EXPECT_EQ(record.wait.call, 2U);
    EXPECT_EQ(record.wait.expected, 2U);
    EXPECT_EQ(record.wait.observed, 1U);
    EXPECT_EQ(record.wait_via, -1);
    EXPECT_EQ(record.wait_role, FERRY_ROLE_NONE);
    EXPECT_EQ(record.wait_node, -1);
    EXPECT_TRUE(last_error_contains("rank 0 waited for rank 1"));
  });
}

TEST(Errors, BackendsMissingFromThisBuildAreUnsupported) {
  run_threads(2, [&](ferry_rank* rank) {
    ferry_config config = small_config();
    config.backend = FERRY_CUDA;
    ferry_exchange* exchange = nullptr;
    EXPECT_EQ(ferry_exchange_create(rank, &config, &exchange), FERRY_UNSUPPORTED);
    EXPECT_EQ(last_record().status, FERRY_UNSUPPORTED);
    EXPECT_EQ(last_record().kind, FERRY_RECORD_NONE);
    EXPECT_TRUE(last_error_contains("cuda"));
  });
}

}  // namespace
}  // namespace ferry::capi_test
