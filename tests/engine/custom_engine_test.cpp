// The engine `custom`: functions of the caller, called on a thread of Ferry's.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/engine.hpp"
#include "engine/transfers.hpp"
#include "ferry/error.hpp"
#include "group/rank_state.hpp"
#include "harness/thread_engine.hpp"
#include "runtime/channel_support.hpp"

namespace ferry::test {
namespace {

constexpr double kGrace = 0.5;  // that an abandoned call gets, in seconds

// Runs `body(rank, engine)` on a thread for each rank and returns the first error.
void run_engines(const ThreadEngine& shared, int ranks, const std::function<void(int, Engine&)>& body) {
  std::vector<std::thread> threads;
  std::vector<std::string> errors(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, *make_custom_engine(shared.functions(rank)));
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// Functions that block until open() is called. Then they write the last byte that they receive.
class Gate {
 public:
  explicit Gate(bool with_abort) : with_abort_(with_abort) {}

  EngineFunctions functions(bool ordered_lanes = true) {
    EngineFunctions functions;
    functions.all_to_all_v = [this](int, const void*, const std::int64_t*, const std::int64_t*, void* receive,
                                    const std::int64_t* bytes, const std::int64_t* offsets) {
      std::unique_lock lock(mutex_);
      ++inside_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
      static_cast<char*>(receive)[offsets[1] + bytes[1] - 1] = 1;
      --inside_;
      changed_.notify_all();
      if (aborts_ > 0) throw std::runtime_error("aborted");
    };
    if (with_abort_) {
      functions.abort = [this] {
        ++aborts_;
        open();
      };
    }
    functions.ordered_lanes = ordered_lanes;
    return functions;
  }

  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void wait_until_inside(int calls) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return inside_ == calls; });
  }
  int aborts() const { return aborts_; }

 private:
  const bool with_abort_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int inside_ = 0;
  std::atomic<int> aborts_ = 0;
};

// The transfer of rank 0 of two ranks that send each other `bytes` bytes.
std::shared_ptr<RankTransfer> transfer_of_two(std::int64_t bytes = 8) {
  return std::make_shared<RankTransfer>(TransferSizes{{0, bytes}, {bytes, 0}}, 0);
}

// A check that gives up after `seconds`.
std::function<void()> deadline(double seconds) {
  return [seconds, watch = Stopwatch()] {
    if (watch.seconds() > seconds) throw TimeoutError("the deadline of the test", {});
  };
}

void transfer(Communicator& communicator, const std::function<void()>& check) {
  const auto memory = transfer_of_two();
  communicator.all_to_all_v(memory->arguments(), memory, check);
}

TEST(CustomEngine, MovesTheBytesOfEveryPair) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    const ThreadEngine shared(ranks);
    run_engines(shared, ranks, [&](int rank, Engine& engine) {
      EXPECT_EQ(engine.kind(), EngineKind::custom);
      const auto lanes = engine.communicators(1);
      for (int round = 0; round < 20; ++round)
        exchange_random(*lanes[0], rank, ranks, 5000, seed() + static_cast<std::uint64_t>(round));
    });
  }
}

TEST(CustomEngine, LanesMeetInAnyOrder) {
  constexpr int kRanks = 3, kLanes = 4;
  const ThreadEngine shared(kRanks);
  run_engines(shared, kRanks, [&](int rank, Engine& engine) {
    EXPECT_FALSE(engine.ordered_lanes());
    const auto lanes = engine.communicators(kLanes);
    std::vector<std::thread> threads;
    for (int i = 0; i < kLanes; ++i) {
      const int lane = (i + rank) % kLanes;
      threads.emplace_back([&, lane] {
        for (int round = 0; round < 10; ++round)
          exchange_random(*lanes[lane], rank, kRanks, 300,
                          seed() + static_cast<std::uint64_t>(100 * lane + round));
      });
      if (rank == 0) sleep_seconds(0.01);
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(CustomEngine, OrderedLanesAreCalledOneAtATime) {
  constexpr int kLanes = 3;
  std::atomic<int> inside = 0, most = 0;
  EngineFunctions functions;
  functions.all_to_all_v = [&](int, const void*, const std::int64_t*, const std::int64_t*, void*,
                               const std::int64_t*, const std::int64_t*) {
    most = std::max<int>(most, ++inside);
    sleep_seconds(0.002);
    --inside;
  };
  const auto engine = make_custom_engine(functions);
  EXPECT_TRUE(engine->ordered_lanes());
  const auto lanes = engine->communicators(kLanes);
  std::vector<std::thread> threads;
  for (const auto& lane : lanes) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) transfer(*lane, no_check);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(most, 1);
}

TEST(CustomEngine, NumbersLanesOverAllExchanges) {
  std::vector<int> seen;
  EngineFunctions functions;
  functions.all_to_all_v = [&](int lane, const void*, const std::int64_t*, const std::int64_t*, void*,
                               const std::int64_t*, const std::int64_t*) { seen.push_back(lane); };
  const auto engine = make_custom_engine(functions);
  const auto first = engine->communicators(2), second = engine->communicators(2);
  for (const auto* lanes : {&second, &first}) {
    for (const auto& lane : *lanes) transfer(*lane, no_check);
  }
  EXPECT_EQ(seen, (std::vector<int>{2, 3, 0, 1}));
}

TEST(CustomEngine, PassesOnWhatTheFunctionThrows) {
  EngineFunctions functions;
  functions.all_to_all_v = [](int, const void*, const std::int64_t*, const std::int64_t*, void*,
                              const std::int64_t*,
                              const std::int64_t*) { throw std::domain_error("the cable is cut"); };
  const auto lanes = make_custom_engine(functions)->communicators(2);  // the lanes outlive the engine
  const auto memory = transfer_of_two();
  for (const auto& lane : {&lanes[0], &lanes[0], &lanes[1]}) {
    try {
      (*lane)->all_to_all_v(memory->arguments(), memory, no_check);
      FAIL() << "nothing was thrown";
    } catch (const std::domain_error& error) {
      EXPECT_STREQ(error.what(), "the cable is cut");
    }
  }
  EXPECT_GT(memory.use_count(), 1) << "the memory of a failed transfer must be kept";
}

TEST(CustomEngine, AbandonsACallThatDoesNotReturn) {
  // Outlives the test: the abandoned thread uses it.
  static Gate gate(/*with_abort=*/false);
  std::weak_ptr<RankTransfer> kept;
  {
    auto lanes = make_custom_engine(gate.functions())->communicators(1);
    const auto memory = transfer_of_two();
    kept = memory;
    const Stopwatch watch;
    EXPECT_THROW(lanes[0]->all_to_all_v(memory->arguments(), memory, deadline(0.2)), TimeoutError);
    EXPECT_LT(watch.seconds(), 0.2 + kGrace + 0.5);
    EXPECT_THROW(transfer(*lanes[0], no_check), TimeoutError);
  }
  ASSERT_FALSE(kept.expired());
  gate.open();  // the function now writes to the memory
  gate.wait_until_inside(0);
  EXPECT_EQ(kept.lock()->receive[kept.lock()->receive_offsets[1] + 7], std::byte{1});
}

TEST(CustomEngine, AbortEndsTheBlockedCallsOfAllLanes) {
  Gate gate(/*with_abort=*/true);
  const auto lanes = make_custom_engine(gate.functions(/*ordered_lanes=*/false))->communicators(2);
  const Stopwatch watch;
  std::thread other([&] { EXPECT_ANY_THROW(transfer(*lanes[1], deadline(0.3))); });
  EXPECT_THROW(transfer(*lanes[0], deadline(0.2)), TimeoutError);
  other.join();
  EXPECT_LT(watch.seconds(), 0.3 + kGrace);
  EXPECT_EQ(gate.aborts(), 1);
}

TEST(CustomEngine, AnAbortThatBlocksOrThrowsDoesNotMatter) {
  static Gate blocked(/*with_abort=*/false), gate(/*with_abort=*/false);
  for (const bool throws : {false, true}) {
    EngineFunctions functions = gate.functions();
    functions.abort = [throws] {
      if (throws) throw std::runtime_error("no abort");
      char byte = 0;
      const std::int64_t zero[2] = {}, one[2] = {1, 1};
      blocked.functions().all_to_all_v(0, nullptr, zero, zero, &byte, one, zero);
    };
    const auto lanes = make_custom_engine(functions)->communicators(1);
    const Stopwatch watch;
    EXPECT_THROW(transfer(*lanes[0], deadline(0.1)), TimeoutError);
    EXPECT_LT(watch.seconds(), 0.1 + kGrace + 0.5);
  }
  gate.open();
  blocked.open();
  gate.wait_until_inside(0);
  blocked.wait_until_inside(0);
}

TEST(CustomEngine, ALaneThatWaitsForItsTurnEndsWithTheOthers) {
  Gate gate(/*with_abort=*/true);
  const auto lanes = make_custom_engine(gate.functions())->communicators(2);
  std::thread first([&] { EXPECT_THROW(transfer(*lanes[0], deadline(0.2)), TimeoutError); });
  gate.wait_until_inside(1);
  EXPECT_THROW(transfer(*lanes[1], no_check), TimeoutError);
  first.join();
}

TEST(CustomEngine, ChecksOftenWhileItWaits) {
  Gate gate(/*with_abort=*/false);
  const auto lanes = make_custom_engine(gate.functions())->communicators(1);
  int checks = 0;
  const Stopwatch watch;
  transfer(*lanes[0], [&] {
    if (++checks == 20) gate.open();
  });
  EXPECT_LT(watch.seconds(), 1.0);  // 20 periods of at most 10 ms, on a busy machine
}

TEST(CustomEngine, AFunctionMustNotCallFerry) {
  std::vector<std::unique_ptr<Communicator>> lanes;
  EngineFunctions functions;
  functions.ordered_lanes = false;
  functions.all_to_all_v = [&](int, const void*, const std::int64_t*, const std::int64_t*, void*,
                               const std::int64_t*, const std::int64_t*) { transfer(*lanes[1], no_check); };
  lanes = make_custom_engine(functions)->communicators(2);
  const auto error = expect_thrown<UsageError>([&] { transfer(*lanes[0], no_check); });
  require_text(error, "the engine's function all_to_all_v called an operation on the same engine");
}

TEST(CustomEngine, AFunctionMustNotCallTheGroup) {
  const TestBootstrap meeting(1);
  std::optional<Rank> joined;
  EngineFunctions functions;
  functions.all_to_all_v = [&](int, const void*, const std::int64_t*, const std::int64_t*, void*,
                               const std::int64_t*, const std::int64_t*) { joined->barrier(); };
  joined = Group::custom(meeting.bootstrap(0), functions).join();
  const auto lanes = joined->state().engine()->communicators(1);
  const auto error = expect_thrown<UsageError>([&] { transfer(*lanes[0], no_check); });
  require_text(error, "called a collective of the group");
}

TEST(CustomEngine, BelongsToGroupsThatBringIt) {
  const TestBootstrap meeting(1);
  const ThreadEngine shared(1);
  Group::custom(meeting.bootstrap(0), shared.functions(0)).run([](const Rank& rank) {
    ASSERT_NE(rank.state().engine(), nullptr);
    EXPECT_EQ(rank.state().engine()->kind(), EngineKind::custom);
  });
  Group::custom(meeting.bootstrap(0)).run([](const Rank& rank) {
    EXPECT_EQ(rank.state().engine(), nullptr);
  });
  Group::threads(2).run([](const Rank& rank) { EXPECT_EQ(rank.state().engine(), nullptr); });
}

TEST(CustomEngine, NeedsItsFunction) {
  const TestBootstrap meeting(1);
  EngineFunctions functions;
  functions.abort = [] {};
  require_text(expect_thrown<UsageError>([&] { Group::custom(meeting.bootstrap(0), functions); }),
               "EngineFunctions::all_to_all_v must be set");
}

TEST(EngineKinds, HaveNames) {
  EXPECT_STREQ(to_string(EngineKind::automatic), "automatic");
  EXPECT_STREQ(to_string(EngineKind::mpi), "mpi");
  EXPECT_STREQ(to_string(EngineKind::custom), "custom");
}

}  // namespace
}  // namespace ferry::test
