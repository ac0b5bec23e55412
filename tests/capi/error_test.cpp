// Every kind of error: its status, its text, its numbers, and what holds afterwards.
#include "ferry/error.hpp"

#include <cerrno>
#include <chrono>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "capi/pair.hpp"
#include "capi/same.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::capi_test {
namespace {

// One token on every rank, for slots of expert 0, 1 and 2.
struct Played {
  Played(ferry_rank* rank, const ferry_config& config) : exchange(make_exchange(rank, config)) {
    args.tokens.parts[0] = values;
    args.tokens.count = 1;
    args.ids = ids;
    args.result = &rows;
  }

  ferry_status dispatch() { return ferry_dispatch(exchange.get(), &args); }

  ExchangeHandle exchange;
  alignas(16) std::uint16_t values[256] = {};
  std::int32_t ids[3] = {0, 1, 2};
  ferry_dispatch_result rows = sized<ferry_dispatch_result>();
  ferry_dispatch_args args = sized<ferry_dispatch_args>();
};

TEST(Errors, HaveTheCodesOfTheHierarchy) {
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
  EXPECT_TRUE(says("files"));
  EXPECT_EQ(capi::guarded([] { throw std::logic_error("odd"); }), FERRY_OTHER);
  EXPECT_STREQ(ferry_last_error(), "odd");
  EXPECT_EQ(capi::guarded([] { throw 5; }), FERRY_OTHER);
  EXPECT_EQ(last_record().status, FERRY_OTHER);
  EXPECT_EQ(last_record().kind, FERRY_RECORD_NONE);
  EXPECT_EQ(capi::guarded([] {}), FERRY_OK);
  EXPECT_EQ(last_record().status, FERRY_OTHER) << "success leaves the last error alone";
}

TEST(Errors, AreOfTheirThread) {
  EXPECT_EQ(ferry_group_set_deadline(nullptr, 1), FERRY_USAGE);
  std::thread([] {
    EXPECT_STREQ(ferry_last_error(), "");
    EXPECT_EQ(last_record().status, FERRY_OK);
  }).join();
  EXPECT_TRUE(says("group is NULL"));
}

// What a rank refuses, by the C++ interface or before it, ends the call everywhere; then all goes on.
TEST(Errors, RefusalsReachThePeers) {
  run_threads(3, [&](ferry_rank* rank) {
    Played played(rank, small_config());
    const bool me = ferry_rank_index(rank) == 1;
    const auto refused = [&](auto change, const std::string& what) {
      const ferry_dispatch_args good = played.args;
      if (me) change(played.args);
      EXPECT_EQ(played.dispatch(), FERRY_USAGE) << what;
      EXPECT_TRUE(says(what));
      EXPECT_TRUE(me || says("rank 1 refused dispatch"));
      EXPECT_EQ(played.rows.total, nullptr) << what;
      played.args = good;
      ASSERT_EQ(played.dispatch(), FERRY_OK) << what << ": " << ferry_last_error();
    };
    ASSERT_EQ(played.dispatch(), FERRY_OK) << ferry_last_error();
    const ferry_plan plan = played.rows.plan;
    refused([](auto& args) { args.tokens.count = 8; }, "8 tokens on rank 1, max_tokens is 7");
    refused([](auto& args) { args.id_type = 2; }, "id_type = 2");
    refused([](auto& args) { args.tokens.type = 3; }, "ferry_tokens.type = 3");
    refused([](auto& args) { args.format.kind = 9; }, "ferry_format.kind = 9");
    refused([&](auto& args) { args.plan = plan; }, "ids and a plan exclude each other");

    auto combine = sized<ferry_combine_args>();
    combine.plan = played.rows.plan;
    combine.outputs.data = combine.result.data = played.values;
    combine.reduction = me ? 4 : FERRY_PARTIAL;
    EXPECT_EQ(ferry_combine(played.exchange.get(), &combine), FERRY_USAGE);
    EXPECT_TRUE(says("reduction = 4"));
    ASSERT_EQ(played.dispatch(), FERRY_OK) << ferry_last_error();

    const ferry_step_metadata* metadata = nullptr;
    auto step = sized<ferry_metadata_args>();
    step.metadata = me ? nullptr : &metadata;
    EXPECT_EQ(ferry_metadata(played.exchange.get(), &step), FERRY_USAGE);
    EXPECT_TRUE(says("metadata is NULL"));
    ASSERT_EQ(played.dispatch(), FERRY_OK) << ferry_last_error();
  });
}

TEST(Errors, ARefusedConfigurationReachesThePeers) {
  run_threads(3, [&](ferry_rank* rank) {
    const bool me = ferry_rank_index(rank) == 2;
    ferry_config config = small_config();
    ferry_exchange* exchange = nullptr;
    if (me) config.layout = 8;
    EXPECT_EQ(ferry_exchange_create(rank, &config, &exchange), FERRY_USAGE);
    EXPECT_TRUE(says("ferry_config.layout = 8"));
    EXPECT_TRUE(me || says("rank 2 refused"));
    EXPECT_EQ(exchange, nullptr);
    EXPECT_EQ(ferry_exchange_create(rank, me ? nullptr : &config, &exchange), FERRY_USAGE);
    EXPECT_TRUE(says("ferry_config is NULL"));
    config = small_config();
    config.hidden += me ? 8 : 0;
    EXPECT_EQ(ferry_exchange_create(rank, &config, &exchange), FERRY_USAGE);
    EXPECT_TRUE(says("hidden is 256 on rank 0 and 264 on rank 2"));
    make_exchange(rank, small_config());
  });
}

TEST(Errors, BadIdsAreReportedWithTheRowsThatCame) {
  run_threads(2, [&](ferry_rank* rank) {
    Played played(rank, small_config());
    const bool me = ferry_rank_index(rank) == 1;
    if (me) played.ids[1] = 10;
    if (me) played.ids[2] = -2;
    EXPECT_EQ(played.dispatch(), me ? FERRY_USAGE : FERRY_OK);
    if (me) {
      const ferry_error_record record = last_record();
      EXPECT_EQ(record.status, FERRY_USAGE);
      ASSERT_EQ(record.kind, FERRY_RECORD_BAD_ID);
      EXPECT_EQ(record.bad_id.rank, 1);
      EXPECT_EQ(record.bad_id.token, 0);
      EXPECT_EQ(record.bad_id.slot, 1);
      EXPECT_EQ(record.bad_id.id, 10);
      EXPECT_EQ(record.bad_id.count, 2);
      EXPECT_TRUE(says("2 expert ids out of range"));
    }
    ASSERT_NE(played.rows.total, nullptr);
    EXPECT_EQ(*played.rows.total, me ? 0 : 4);
    played.ids[1] = played.ids[2] = 1;
    EXPECT_EQ(ferry_check(played.exchange.get(), 0), FERRY_OK) << "it has been reported";
  });
}

TEST(Errors, OverflowIsReportedWithTheRowsThatCame) {
  ferry_config config = small_config();
  config.capacity = 4;
  config.manual_check = 1;
  run_threads(2, [&](ferry_rank* rank) {
    Played played(rank, config);
    ASSERT_EQ(played.dispatch(), FERRY_OK) << "manual_check leaves it to ferry_check";
    EXPECT_EQ(*played.rows.total, ferry_rank_index(rank) == 0 ? 4 : 0);
    EXPECT_EQ(ferry_check(played.exchange.get(), 0), FERRY_OVERFLOW);
    const ferry_error_record record = last_record();
    EXPECT_EQ(record.status, FERRY_OVERFLOW);
    ASSERT_EQ(record.kind, FERRY_RECORD_OVERFLOW);
    EXPECT_EQ(record.overflow.rank, 0);
    EXPECT_EQ(record.overflow.capacity, 4);
    EXPECT_EQ(record.overflow.needed, 6);
    EXPECT_EQ(record.overflow.dropped, 2);
    EXPECT_EQ(ferry_check(played.exchange.get(), 0), FERRY_OK);
    EXPECT_EQ(ferry_check(played.exchange.get(), 1), FERRY_USAGE);
    EXPECT_TRUE(says("lane 1"));
  });
}

TEST(Errors, BadSourcesAreReported) {
  run_threads(1, [&](ferry_rank* rank) {
    Played played(rank, small_config());
    ASSERT_EQ(played.dispatch(), FERRY_OK) << ferry_last_error();
    const ferry_plan plan = played.rows.plan;
    contract::Buffer copy(static_cast<std::int64_t>(plan.bytes));
    ASSERT_EQ(ferry_plan_copy(&plan, copy.data(), plan.bytes, &played.args.plan), FERRY_OK);
    view_plan(copy.data(), static_cast<PlanHeader*>(plan.storage)->shape).counts[2] = 1 << 30;
    played.args.ids = nullptr;
    EXPECT_EQ(played.dispatch(), FERRY_USAGE);
    const ferry_error_record record = last_record();
    ASSERT_EQ(record.kind, FERRY_RECORD_BAD_SOURCE) << ferry_last_error();
    EXPECT_EQ(record.bad_source.rank, 0);
    EXPECT_EQ(record.bad_source.index, 2);
    EXPECT_EQ(record.bad_source.count, 1);
    EXPECT_NE(played.rows.total, nullptr);
  });
}

TEST(Errors, ATimeoutNamesWhoWaitedForWhom) {
  ferry_config config = small_config();
  config.deadline = 0.2;
  run_threads(2, [&](ferry_rank* rank) {
    Played played(rank, config);
    ASSERT_EQ(played.dispatch(), FERRY_OK) << ferry_last_error();
    if (ferry_rank_index(rank) == 1) std::this_thread::sleep_for(std::chrono::milliseconds(900));
    EXPECT_EQ(played.dispatch(), FERRY_TIMEOUT);
    const ferry_error_record record = last_record();
    EXPECT_EQ(record.status, FERRY_TIMEOUT);
    ASSERT_EQ(record.kind, FERRY_RECORD_WAIT);
    EXPECT_EQ(played.rows.total, nullptr);
    if (ferry_rank_index(rank) == 1) return;  // it came too late and waited for nobody
    EXPECT_EQ(record.wait.operation, FERRY_DISPATCH);
    EXPECT_EQ(record.wait.rank, 0);
    EXPECT_EQ(record.wait.peer, 1);
    EXPECT_EQ(record.wait.call, 2U);
    EXPECT_EQ(record.wait.expected, 2U);
    EXPECT_EQ(record.wait.seen, 1U);
    EXPECT_TRUE(says("rank 0 waited for rank 1"));
  });
}

TEST(Errors, WhatThisBuildCannotDoIsUnsupported) {
  run_threads(2, [&](ferry_rank* rank) {
    ferry_config config = small_config();
    config.backend = FERRY_CUDA;
    ferry_exchange* exchange = nullptr;
    EXPECT_EQ(ferry_exchange_create(rank, &config, &exchange), FERRY_UNSUPPORTED);
    EXPECT_EQ(last_record().status, FERRY_UNSUPPORTED);
    EXPECT_EQ(last_record().kind, FERRY_RECORD_NONE);
    EXPECT_TRUE(says("cuda"));
  });
}

}  // namespace
}  // namespace ferry::capi_test
