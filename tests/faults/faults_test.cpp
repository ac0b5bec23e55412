// A rank stalls, throws or is killed at every named point of the protocol: every other rank gets a typed
// error in time that names who was missing, and the process stays usable.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/fault_points.hpp"
#include "core/text.hpp"
#include "ferry/ferry.hpp"

namespace ferry {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3;
constexpr int kVictim = 1;
constexpr double kDeadline = 0.4;

enum class Fault { stall, raise, kill };

const char* name_of(Fault fault) {
  return fault == Fault::stall ? "stall" : fault == Fault::raise ? "throw" : "kill";
}

// What the hook does; the same in every rank's process.
FaultPoint faulty_point;
Fault faulty;

struct Planned : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void hook(FaultPoint point, int rank) {
  if (point != faulty_point || rank != kVictim) return;
  if (faulty == Fault::stall) std::this_thread::sleep_for(std::chrono::duration<double>(kDeadline + 0.9));
  if (faulty == Fault::raise) throw Planned("planned");
  if (faulty == Fault::kill) raise(SIGKILL);
}

// What a surviving rank saw, in memory that parent and children share.
struct Seen {
  std::atomic<int> code;
  std::atomic<int> peer;
  std::atomic<int> waiting;
  std::atomic<double> seconds;
};

class Faults : public testing::TestWithParam<std::tuple<FaultPoint, Fault, bool>> {
 protected:
  void SetUp() override {
    seen_ = static_cast<Seen*>(
        mmap(nullptr, sizeof(Seen) * kRanks, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(seen_, MAP_FAILED);
    std::tie(faulty_point, faulty, processes_) = GetParam();
    fault_hook = hook;
  }
  void TearDown() override {
    fault_hook = nullptr;
    munmap(seen_, sizeof(Seen) * kRanks);
  }

  Group group() const {
    Group group = processes_ ? Group::processes(kRanks) : Group::threads(kRanks);
    group.set_deadline(kDeadline);
    return group;
  }

  // Operations until one fails; a step is all that a training step or a decode step would call.
  static void play(const Rank& rank) {
    constexpr int kHidden = 64, kTokens = 5, kTopK = 2;
    Exchange exchange(
        rank,
        {.experts = 6, .top_k = kTopK, .hidden = kHidden, .max_tokens = kTokens, .deadline = kDeadline});
    alignas(16) std::array<std::uint16_t, kHidden * kTokens> x{}, y{};
    std::array<std::int32_t, kTopK * kTokens> ids{};
    std::array<float, kTopK * kTokens> weights{};
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int>(i * 5 + 1) % 6;
    std::vector<float> values(static_cast<std::size_t>(exchange.capacity()));
    for (int step = 0; step < 3; ++step) {
      exchange.metadata(kTokens);
      Arrivals rows = exchange.dispatch(Tokens::rows(x.data(), kTokens), ids.data(), weights.data());
      exchange.route_values(weights.data(), rows.plan, values.data());
      exchange.combine({.data = rows.data}, rows.plan, {.data = y.data()}, {.weights = rows.weight});
    }
  }

  Seen* seen_ = nullptr;
  bool processes_ = false;
};

TEST_P(Faults, EveryOtherRankGetsATypedErrorInTime) {
  Seen* seen = seen_;
  try {
    group().run([seen](Rank rank) {
      const auto start = Clock::now();
      try {
        play(rank);
      } catch (const TimeoutError& error) {
        seen[rank.index()].peer = error.record.peer;
        seen[rank.index()].waiting = error.record.rank;
        seen[rank.index()].code = static_cast<int>(error.code());
      } catch (const PeerLostError& error) {
        seen[rank.index()].peer = error.record.peer;
        seen[rank.index()].waiting = error.record.rank;
        seen[rank.index()].code = static_cast<int>(error.code());
      }
      seen[rank.index()].seconds = std::chrono::duration<double>(Clock::now() - start).count();
    });
    // run() rethrows what a rank threw; a stalled rank ends by itself.
    EXPECT_EQ(faulty, Fault::stall);
  } catch (const PeerLostError& error) {
    EXPECT_EQ(faulty, Fault::kill) << error.what();
  } catch (const std::exception& error) {
    EXPECT_EQ(faulty, Fault::raise) << error.what();
    EXPECT_NE(std::string(error.what()).find("planned"), std::string::npos) << error.what();
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kVictim) continue;
    SCOPED_TRACE(str("rank ", rank, " at ", to_string(faulty_point)));
    const auto code = static_cast<ErrorCode>(seen[rank].code.load());
    EXPECT_EQ(code, faulty == Fault::stall ? ErrorCode::timeout : ErrorCode::peer_lost);
    EXPECT_EQ(seen[rank].peer, kVictim);
    EXPECT_EQ(seen[rank].waiting, rank);
    EXPECT_LT(seen[rank].seconds, faulty == Fault::stall ? kDeadline + 1.0 : 1.0);
  }
}

TEST_P(Faults, SurvivorsBuildANewGroup) {
  try {
    group().run([](Rank rank) { play(rank); });
  } catch (const std::exception&) {
    // the fault, as the test above checks
  }
  fault_hook = nullptr;
  int calls = 0;
  Group::threads(kRanks - 1).run([&calls](Rank rank) {
    play(rank);
    if (rank.index() == 0) ++calls;
  });
  EXPECT_EQ(calls, 1);
}

std::string case_name(const testing::TestParamInfo<Faults::ParamType>& test) {
  std::string name = str(to_string(std::get<0>(test.param)), "_", name_of(std::get<1>(test.param)));
  std::replace_if(name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name;
}

// After the last point of a call nobody waits for the victim in that call; the next one notices.
INSTANTIATE_TEST_SUITE_P(Threads, Faults,
                         testing::Combine(testing::ValuesIn(kFaultPoints),
                                          testing::Values(Fault::stall, Fault::raise),
                                          testing::Values(false)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Processes, Faults,
                         testing::Combine(testing::ValuesIn(kFaultPoints),
                                          testing::Values(Fault::stall, Fault::kill), testing::Values(true)),
                         case_name);

}  // namespace
}  // namespace ferry
