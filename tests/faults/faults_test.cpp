// A rank stalls, throws or is killed at every named point of the protocol: every other rank gets a typed
// error in time that names who was missing where, and the survivors go on in a group of their own.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "backends/cpu/chunk_schedule.hpp"
#include "base/text.hpp"
#include "ferry/ferry.hpp"
#include "group/fault_points.hpp"
#include "runtime/support.hpp"

namespace ferry {
namespace {

constexpr int kRanks = 3;
constexpr int kVictim = 1;
constexpr double kDeadline = 0.4;
constexpr double kPatience = 30;  // of groups in which nothing goes wrong

enum class Fault { stall, raise, kill };

const char* name_of(Fault fault) {
  return fault == Fault::stall ? "stall" : fault == Fault::raise ? "throw" : "kill";
}

// How the operations are called: whole, in halves, on the second lane after the first has been used, with
// dispatches by a kept plan, or in chunks of one row.
enum class Way { whole, halves, second_lane, replay, chunks };

const char* name_of(Way way) {
  constexpr const char* kNames[] = {"whole", "halves", "second_lane", "replay", "chunks"};
  return kNames[static_cast<int>(way)];
}

// What the hook does; the same in every rank's process.
FaultPoint faulty_point;
Fault faulty;
thread_local bool armed = false;

struct Planned : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void hook(FaultPoint point, int rank) {
  if (!armed || point != faulty_point || rank != kVictim) return;
  if (faulty == Fault::stall) test::sleep_seconds(kDeadline + 0.9);
  if (faulty == Fault::raise) throw Planned("planned");
  if (faulty == Fault::kill) raise(SIGKILL);
}

// Operations of one rank, step by step; a step is all that a training step or a decode step would call.
class Player {
 public:
  Player(const Rank& rank, Way way, double deadline)
      : way_(way),
        lane_(way == Way::second_lane ? 1 : 0),
        exchange_(rank, {.experts = 6,
                         .top_k = kTopK,
                         .hidden = kHidden,
                         .max_tokens = kTokens,
                         .lanes = 2,
                         .deadline = deadline}),
        values_(static_cast<std::size_t>(exchange_.capacity())) {
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<int>(i * 5 + 1) % 6;
    x_.fill(kOne);
  }

  // What comes before the faults: calls of the lane that are played in it.
  std::uint64_t prepare() {
    if (way_ == Way::second_lane) step(0);
    if (way_ != Way::replay) return 0;
    kept_ = exchange_.dispatch(Tokens::rows(x_.data(), kTokens), ids_.data(), weights_.data()).plan.copy();
    return 1;
  }

  void play() {
    for (int i = 0; i < 3; ++i) step(lane_);
  }

 private:
  static constexpr int kHidden = 64, kTokens = 5, kTopK = 2;
  static constexpr std::uint16_t kOne = 0x3F80;  // in bf16

  DispatchResult dispatch(int lane) {
    const Tokens tokens = Tokens::rows(x_.data(), kTokens);
    const DispatchOptions options{.lane = lane};
    if (way_ == Way::replay) return exchange_.dispatch(tokens, kept_, weights_.data(), options);
    if (way_ != Way::halves) return exchange_.dispatch(tokens, ids_.data(), weights_.data(), options);
    exchange_.dispatch_send(tokens, ids_.data(), weights_.data(), options);
    return exchange_.dispatch_receive(lane);
  }

  void combine(const DispatchResult& rows, int lane) {
    y_.fill(0x7F7F);
    const CombineOptions options{.row_weights = rows.weight, .lane = lane};
    if (way_ == Way::halves) {
      exchange_.combine_send({.data = rows.data}, rows.plan, {.data = y_.data()}, options);
      exchange_.combine_receive(lane);
    } else {
      exchange_.combine({.data = rows.data}, rows.plan, {.data = y_.data()}, options);
    }
    // Two halves of one.
    if (std::any_of(y_.begin(), y_.end(), [](std::uint16_t y) { return y != kOne; }))
      throw std::runtime_error("a wrong sum");
  }

  void step(int lane) {
    exchange_.metadata(kTokens, lane);
    const DispatchResult rows = dispatch(lane);
    exchange_.route_values(weights_.data(), rows.plan, values_.data(), lane);
    combine(rows, lane);
  }

  Way way_;
  int lane_;
  Exchange exchange_;
  Plan kept_;
  std::vector<float> values_;
  alignas(16) std::array<std::uint16_t, kHidden * kTokens> x_{}, y_{};
  std::array<std::int32_t, kTopK * kTokens> ids_{};
  std::array<float, kTopK * kTokens> weights_ = [] {
    std::array<float, kTopK * kTokens> halves{};
    halves.fill(0.5f);
    return halves;
  }();
};

// What a surviving rank saw, in memory that parent and children share; read when they have ended.
struct Seen {
  ErrorCode code;
  WaitRecord record;
  std::uint64_t calls_before;  // of its lane
  double seconds;
  bool named;    // the message names the victim
  bool rebuilt;  // it has played in a group of the survivors
};

// The calls of a step, in order, and which of them a point belongs to.
constexpr Operation kCalls[] = {Operation::metadata, Operation::dispatch, Operation::route_values,
                                Operation::combine};

int call_of(FaultPoint point) {
  const std::string name = to_string(point);
  for (int i = 0; i < 4; ++i) {
    if (name.starts_with(to_string(kCalls[i]))) return i;
  }
  return -1;  // construction
}

// The victim has posted the call already: nobody misses it before the next one, or before the call's next
// chunk.
bool has_posted(FaultPoint point) {
  const std::string name = to_string(point);
  return !name.ends_with("_begin") && !name.ends_with("_sent");
}

// Whether later chunks of a call in chunks are missing.
bool before_chunks(FaultPoint point) {
  const std::string name = to_string(point);
  return name.ends_with("_posted") || name.ends_with("_waited") || name.ends_with("_chunk_sent");
}

class Faults : public testing::TestWithParam<std::tuple<FaultPoint, Fault, bool, Way>> {
 protected:
  void SetUp() override {
    void* memory =
        mmap(nullptr, sizeof(Seen) * kRanks, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    seen_ = static_cast<Seen*>(memory);
    std::tie(faulty_point, faulty, processes_, way_) = GetParam();
    set_fault_hook(hook);
    cpu::chunk_budget = way_ == Way::chunks ? 1 : 8 << 20;
  }
  void TearDown() override {
    set_fault_hook(nullptr);
    munmap(seen_, sizeof(Seen) * kRanks);
  }

  // Runs the ranks into the fault; `afterwards` is what survivors do.
  void run(const std::function<void(Rank)>& afterwards) {
    Group group = processes_ ? Group::processes(kRanks) : Group::threads(kRanks);
    group.set_deadline(kDeadline);
    group.run([this, afterwards](const Rank& rank) {
      meet_the_fault(rank);
      armed = false;
      if (rank.index() != kVictim) afterwards(rank);
    });
  }

  void meet_the_fault(const Rank& rank) {
    Seen& seen = seen_[rank.index()];
    const test::Stopwatch watch;
    const auto note = [&](const auto& error) {
      seen.code = error.code();
      seen.record = error.record;
      seen.named = std::string(error.what()).find(str("rank ", kVictim)) != std::string::npos;
    };
    try {
      armed = faulty_point == FaultPoint::construct_mapped;
      Player player(rank, way_, kDeadline);
      seen.calls_before = player.prepare();
      armed = true;
      player.play();
    } catch (const TimeoutError& error) {
      note(error);
    } catch (const PeerLostError& error) {
      note(error);
    }
    seen.seconds = watch.seconds();
  }

  // The call in which a survivor misses the victim. One that is told early may still wait for the other
  // survivor in the call before.
  void expect_call(const Seen& seen) const {
    const bool chunk = way_ == Way::chunks && before_chunks(faulty_point);
    const int call = call_of(faulty_point) + (has_posted(faulty_point) && !chunk ? 1 : 0);
    const WaitRecord& record = seen.record;
    const auto in_call = [&](int number) {
      return number >= 0 && record.operation == kCalls[number % 4] &&
             record.call == seen.calls_before + static_cast<std::uint64_t>(number) + 1;
    };
    EXPECT_TRUE(in_call(call) || (faulty != Fault::stall && has_posted(faulty_point) && in_call(call - 1)))
        << describe(record);
    EXPECT_LT(record.seen, record.expected);
    if (faulty == Fault::stall) {
      EXPECT_EQ(record.seen, record.expected - 1);
    }
    if (!chunk) {
      EXPECT_EQ(record.expected, record.call);
    } else if (faulty == Fault::stall) {
      EXPECT_EQ(record.expected, 1u);  // the first chunk after the call's letter
    }
  }

  Seen* seen_ = nullptr;
  bool processes_ = false;
  Way way_ = Way::whole;
};

TEST_P(Faults, EveryOtherRankGetsATypedErrorInTime) {
  try {
    run([](const Rank&) {});
    // run() rethrows what a rank threw; a stalled rank ends by itself.
    EXPECT_EQ(faulty, Fault::stall);
  } catch (const PeerLostError& error) {
    EXPECT_EQ(faulty, Fault::kill) << error.what();
  } catch (const std::exception& error) {
    EXPECT_EQ(faulty, Fault::raise) << error.what();
    EXPECT_NE(std::string(error.what()).find("planned"), std::string::npos) << error.what();
  }
  for (const int rank : {0, 2}) {
    SCOPED_TRACE(str("rank ", rank, " at ", to_string(faulty_point)));
    const Seen& seen = seen_[rank];
    EXPECT_EQ(seen.code, faulty == Fault::stall ? ErrorCode::timeout : ErrorCode::peer_lost);
    EXPECT_EQ(seen.record.peer, kVictim);
    EXPECT_EQ(seen.record.rank, rank);
    EXPECT_TRUE(seen.named);
    expect_call(seen);
    EXPECT_LT(seen.seconds, faulty == Fault::stall ? kDeadline + 1.0 : 1.0);
  }
}

TEST_P(Faults, SurvivorsBuildANewGroup) {
  const test::Meeting meeting(kRanks - 1);
  try {
    run([&](const Rank& rank) {
      Group survivors = Group::custom(meeting.bootstrap(rank.index() > kVictim ? 1 : 0));
      survivors.run([&](const Rank& again) {
        Player player(again, way_, kPatience);
        player.prepare();
        player.play();
      });
      seen_[rank.index()].rebuilt = true;
    });
  } catch (const std::exception&) {
    // the fault, as the test above checks
  }
  EXPECT_TRUE(seen_[0].rebuilt);
  EXPECT_TRUE(seen_[2].rebuilt);
}

std::string case_name(const testing::TestParamInfo<Faults::ParamType>& test) {
  std::string name = str(to_string(std::get<0>(test.param)), "_", name_of(std::get<1>(test.param)));
  if (std::get<3>(test.param) != Way::whole) name += str("_", name_of(std::get<3>(test.param)));
  std::replace_if(name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name;
}

// Where the ways of calling differ.
constexpr FaultPoint kPointsOfWays[] = {FaultPoint::dispatch_begin,    FaultPoint::dispatch_rows_sent,
                                        FaultPoint::dispatch_posted,   FaultPoint::dispatch_waited,
                                        FaultPoint::combine_rows_sent, FaultPoint::combine_posted,
                                        FaultPoint::combine_waited};

constexpr FaultPoint kPointsOfChunks[] = {FaultPoint::dispatch_posted,     FaultPoint::dispatch_waited,
                                          FaultPoint::dispatch_chunk_sent, FaultPoint::combine_posted,
                                          FaultPoint::combine_waited,      FaultPoint::combine_chunk_sent};

// Those that a call of one chunk passes.
std::vector<FaultPoint> points_of_whole_calls() {
  std::vector<FaultPoint> points(kFaultPoints.begin(), kFaultPoints.end());
  std::erase(points, FaultPoint::dispatch_chunk_sent);
  std::erase(points, FaultPoint::combine_chunk_sent);
  return points;
}

auto cases_of_chunks(bool processes) {
  const auto faults = testing::Values(Fault::stall, processes ? Fault::kill : Fault::raise);
  return testing::Combine(testing::ValuesIn(kPointsOfChunks), faults, testing::Values(processes),
                          testing::Values(Way::chunks));
}

auto cases(bool processes) {
  const auto faults = testing::Values(Fault::stall, processes ? Fault::kill : Fault::raise);
  return testing::Combine(testing::ValuesIn(points_of_whole_calls()), faults, testing::Values(processes),
                          testing::Values(Way::whole));
}

auto cases_of_ways(bool processes) {
  const auto faults = testing::Values(Fault::stall, processes ? Fault::kill : Fault::raise);
  return testing::Combine(testing::ValuesIn(kPointsOfWays), faults, testing::Values(processes),
                          testing::Values(Way::halves, Way::second_lane, Way::replay));
}

INSTANTIATE_TEST_SUITE_P(Threads, Faults, cases(false), case_name);
INSTANTIATE_TEST_SUITE_P(Processes, Faults, cases(true), case_name);
INSTANTIATE_TEST_SUITE_P(ChunksOfThreads, Faults, cases_of_chunks(false), case_name);
INSTANTIATE_TEST_SUITE_P(ChunksOfProcesses, Faults, cases_of_chunks(true), case_name);
INSTANTIATE_TEST_SUITE_P(WaysOfThreads, Faults, cases_of_ways(false), case_name);
INSTANTIATE_TEST_SUITE_P(WaysOfProcesses, Faults, cases_of_ways(true), case_name);

}  // namespace
}  // namespace ferry
