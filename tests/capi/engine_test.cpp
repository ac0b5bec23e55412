// The caller's transport through the C interface: functions get what Ferry passes, and their statuses count.
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "capi/boundary.hpp"
#include "capi/run.hpp"
#include "engine/engine.hpp"
#include "group/rank_state.hpp"

namespace ferry::capi_test {
namespace {

// A group of one rank, whose all-to-all copies what it sends to itself.
struct LoopEngine {
  std::vector<std::int32_t> lanes;
  std::atomic<bool> entered = false;
  std::atomic<bool> aborted = false;
  bool blocks = false;
  ferry_status status = FERRY_OK;

  static ferry_status all_to_all_v(std::int32_t lane, const void* send, const std::int64_t* send_bytes,
                                   const std::int64_t* send_offsets, void* receive,
                                   const std::int64_t* receive_bytes, const std::int64_t* receive_offsets,
                                   void* user) {
    auto& self = *static_cast<LoopEngine*>(user);
    self.lanes.push_back(lane);
    self.entered = true;
    while (self.blocks && !self.aborted) std::this_thread::yield();
    EXPECT_EQ(send_bytes[0], receive_bytes[0]);
    std::memcpy(static_cast<char*>(receive) + receive_offsets[0],
                static_cast<const char*>(send) + send_offsets[0], static_cast<std::size_t>(send_bytes[0]));
    return self.aborted ? FERRY_SYSTEM : self.status;
  }
  static void abort(void* user) { static_cast<LoopEngine*>(user)->aborted = true; }

  ferry_engine_functions functions() {
    auto made = sized<ferry_engine_functions>();
    made.all_to_all_v = all_to_all_v;
    made.abort = abort;
    made.user = this;
    return made;
  }
};

ferry_bootstrap bootstrap_of_one() {
  auto bootstrap = sized<ferry_bootstrap>();
  bootstrap.ranks = 1;
  bootstrap.all_gather = [](const void* mine, void* all, std::size_t bytes, void*) -> ferry_status {
    if (bytes > 0) std::memcpy(all, mine, bytes);
    return FERRY_OK;
  };
  bootstrap.barrier = [](void*) -> ferry_status { return FERRY_OK; };
  return bootstrap;
}

// Sends "abc" on a lane of the group's engine, and returns what arrived.
std::string send_text(Engine& engine, const std::function<void()>& check = [] {}) {
  const auto lanes = engine.communicators(1);
  const auto memory = std::make_shared<std::string>("abc---");
  auto* bytes = reinterpret_cast<std::byte*>(memory->data());
  const std::int64_t three = 3, zero = 0;
  lanes[0]->all_to_all_v({bytes, {&three, 1}, {&zero, 1}, bytes, {&three, 1}, {&three, 1}}, memory, check);
  return memory->substr(3);
}

class CEngine : public testing::Test {
 protected:
  // Runs `body` with the engine of a group that was made with these functions.
  static ferry_status run_engine(const ferry_engine_functions& functions,
                                 const std::function<void(Engine&)>& body) {
    const ferry_bootstrap bootstrap = bootstrap_of_one();
    ferry_group* made = nullptr;
    const ferry_status status = ferry_group_custom(&bootstrap, &functions, &made);
    if (status != FERRY_OK) return status;
    const GroupHandle group(made, ferry_group_destroy);
    return run(made, [&](ferry_rank* rank) {
      ASSERT_NE(rank->rank.state().engine(), nullptr);
      body(*rank->rank.state().engine());
    });
  }

  LoopEngine loop_;
};

TEST_F(CEngine, MovesBytesForEachLane) {
  EXPECT_EQ(run_engine(loop_.functions(),
                       [](Engine& engine) {
                         EXPECT_TRUE(engine.ordered_lanes());
                         EXPECT_EQ(send_text(engine), "abc");
                         EXPECT_EQ(send_text(engine), "abc");
                       }),
            FERRY_OK);
  EXPECT_EQ(loop_.lanes, (std::vector<std::int32_t>{0, 1}));
  ferry_engine_functions functions = loop_.functions();
  functions.unordered_lanes = 1;
  EXPECT_EQ(run_engine(functions, [](Engine& engine) { EXPECT_FALSE(engine.ordered_lanes()); }), FERRY_OK);
}

TEST_F(CEngine, AStatusBecomesAnError) {
  loop_.status = FERRY_UNSUPPORTED;
  EXPECT_EQ(run_engine(loop_.functions(),
                       [](Engine& engine) {
                         try {
                           send_text(engine);
                           ADD_FAILURE() << "nothing was thrown";
                         } catch (const UnsupportedError& error) {
                           EXPECT_STREQ(error.what(),
                                        "ferry_engine_functions.all_to_all_v returned 6 (unsupported)");
                         }
                       }),
            FERRY_OK);
}

TEST_F(CEngine, AbortEndsABlockedCall) {
  loop_.blocks = true;
  EXPECT_EQ(run_engine(loop_.functions(),
                       [&](Engine& engine) {
                         const auto give_up = [&] {
                           if (loop_.entered) throw TimeoutError("", {});
                         };
                         EXPECT_THROW(send_text(engine, give_up), TimeoutError);
                       }),
            FERRY_OK);
  EXPECT_TRUE(loop_.aborted);
}

TEST_F(CEngine, NeedsItsFunction) {
  ferry_engine_functions functions = loop_.functions();
  functions.all_to_all_v = nullptr;
  EXPECT_TRUE(
      is_refused(run_engine(functions, [](Engine&) {}), "ferry_engine_functions.all_to_all_v is NULL"));
  functions = loop_.functions();
  functions.size = 1;
  EXPECT_TRUE(is_refused(run_engine(functions, [](Engine&) {}), "ferry_engine_functions: size = 1"));
}

}  // namespace
}  // namespace ferry::capi_test
