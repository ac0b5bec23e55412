// A rank stalls, throws or is killed at every fault point of the protocol. Every other rank must get a typed
// error in time that names the failed rank and the call, and the survivors must be able to continue in a new
// group.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <iterator>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/text.hpp"
#include "ferry/ferry.hpp"
#include "group/fault_points.hpp"
#include "group/rank_state.hpp"
#include "runtime/support.hpp"

namespace ferry {
namespace {

constexpr int kRanks = 3;
constexpr int kVictim = 1;
constexpr double kDeadline = 0.4;
constexpr double kNoFaultDeadline = 30;  // of groups without a fault

enum class Fault { stall, raise, kill };

const char* name_of(Fault fault) {
  return fault == Fault::stall ? "stall" : fault == Fault::raise ? "throw" : "kill";
}

// How the operations are called.
enum class CallForm {
  fused,
  split,        // send phase and receive phase as separate calls
  second_lane,  // after the first lane has been used
  replay,       // dispatches from a kept plan
  chunked,      // in chunks of one row
  two_hops,     // the victim is the relay of rank 0, in windows of one message
};

// The simulated node of each rank.
std::vector<int> nodes_of(CallForm form) {
  return form == CallForm::two_hops ? std::vector{0, 1, 1} : std::vector{0, 0, 0};
}

const char* name_of(CallForm form) {
  constexpr const char* kNames[] = {"fused", "split", "second_lane", "replay", "chunked", "two_hops"};
  return kNames[static_cast<int>(form)];
}

// The fault of the current test; the same in every rank's process.
FaultPoint fault_at;
Fault fault;
thread_local bool armed = false;
const test::SharedValue<std::atomic<int>>* survivors_with_error = nullptr;

struct InjectedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void inject_fault(FaultPoint point, int rank) {
  if (!armed || point != fault_at || rank != kVictim) return;
  armed = false;  // one fault, also at a point of every chunk
  if (fault == Fault::stall) test::await_ranks(*survivors_with_error, kRanks - 1);
  if (fault == Fault::raise) throw InjectedError("injected");
  if (fault == Fault::kill) raise(SIGKILL);
}

// Runs steps on one rank; a step calls every operation once, as a training step would.
class StepRunner {
 public:
  StepRunner(const Rank& rank, CallForm form, double deadline)
      : form_(form),
        lane_(form == CallForm::second_lane ? 1 : 0),
        exchange_(with_chunks(rank, form), {.experts = 6,
                                            .top_k = kTopK,
                                            .hidden = kHidden,
                                            .max_tokens = kTokens,
                                            .hops = form == CallForm::two_hops ? Hops::two : Hops::one,
                                            .window = 1,
                                            .lanes = 2,
                                            .deadline = deadline}),
        values_(static_cast<std::size_t>(exchange_.capacity())) {
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<int>(i * 5 + 1) % 6;
    x_.fill(kOne);
  }

  // The calls before the fault is armed. Returns how many of them used the lane under test.
  std::uint64_t prepare() {
    if (form_ == CallForm::second_lane) step(0);
    if (form_ != CallForm::replay) return 0;
    kept_ = exchange_.dispatch(Tokens::rows(x_.data(), kTokens), ids_.data(), weights_.data()).plan.copy();
    return 1;
  }

  void run() {
    for (int i = 0; i < 3; ++i) step(lane_);
  }

 private:
  // Sets the size of the chunks, before the exchange is constructed.
  static const Rank& with_chunks(const Rank& rank, CallForm form) {
    if (form == CallForm::chunked) rank.state().set_chunk_budget(1);
    return rank;
  }

  static constexpr int kHidden = 64, kTokens = 5, kTopK = 2;
  static constexpr std::uint16_t kOne = 0x3F80;  // 1.0 in bf16

  DispatchResult dispatch(int lane) {
    const Tokens tokens = Tokens::rows(x_.data(), kTokens);
    const DispatchOptions options{.call = {.lane = lane}};
    if (form_ == CallForm::replay) return exchange_.dispatch(tokens, kept_, weights_.data(), options);
    if (form_ != CallForm::split) return exchange_.dispatch(tokens, ids_.data(), weights_.data(), options);
    exchange_.dispatch_send(tokens, ids_.data(), weights_.data(), options);
    return exchange_.dispatch_receive({.lane = lane});
  }

  void combine(const DispatchResult& rows, int lane) {
    y_.fill(0x7F7F);
    const CombineOptions options{.call = {.lane = lane}, .row_weights = rows.weight};
    if (form_ == CallForm::split) {
      exchange_.combine_send({.data = rows.data}, rows.plan, {.data = y_.data()}, options);
      exchange_.combine_receive({.lane = lane});
    } else {
      exchange_.combine({.data = rows.data}, rows.plan, {.data = y_.data()}, options);
    }
    // Every token has two routes of weight 0.5 each, so every sum is 1.
    if (std::any_of(y_.begin(), y_.end(), [](std::uint16_t y) { return y != kOne; }))
      throw std::runtime_error("wrong sum");
  }

  void step(int lane) {
    exchange_.metadata(kTokens, {.lane = lane});
    const DispatchResult rows = dispatch(lane);
    exchange_.route_values(weights_.data(), rows.plan, values_.data(), {.lane = lane});
    combine(rows, lane);
    gather(lane);
  }

  // As many rows as a dispatch stages: two calls, one of counts and one of rows.
  void gather(int lane) {
    exchange_.all_gather_v({.rows = x_.data(),
                            .count = kTokens,
                            .row_bytes = 2 * kHidden,
                            .gathered = gathered_.data(),
                            .capacity = kRanks * kTokens},
                           {.lane = lane});
    if (std::any_of(gathered_.begin(), gathered_.begin() + exchange_.rank().size() * kTokens * kHidden,
                    [](std::uint16_t x) { return x != kOne; }))
      throw std::runtime_error("wrong rows");
  }

  CallForm form_;
  int lane_;
  Exchange exchange_;
  Plan kept_;
  std::vector<float> values_;
  alignas(16) std::array<std::uint16_t, kHidden * kTokens> x_{}, y_{};
  alignas(16) std::array<std::uint16_t, kRanks * kHidden * kTokens> gathered_{};
  std::array<std::int32_t, kTopK * kTokens> ids_{};
  std::array<float, kTopK * kTokens> weights_ = [] {
    std::array<float, kTopK * kTokens> weights{};
    weights.fill(0.5f);
    return weights;
  }();
};

// A surviving rank's observation. In memory shared by all processes; the test reads it after they have ended.
struct Observation {
  ErrorCode code;
  WaitRecord record;
  std::uint64_t calls_before;  // on the lane under test, before the fault was armed
  double seconds;
  bool victim_named;      // in the message
  bool ran_in_new_group;  // of the survivors
};

// The calls of a step, in order.
constexpr Operation kCalls[] = {Operation::metadata, Operation::dispatch,     Operation::route_values,
                                Operation::combine,  Operation::all_gather_v, Operation::all_gather_v};
constexpr int kCallsOfStep = std::size(kCalls);

// Points of calls in two hops alone.
bool is_of_hops(FaultPoint point) {
  return point == FaultPoint::relay_holds || point == FaultPoint::hop_begin;
}

// Index in kCalls of the call that the point belongs to; -1: construction.
int call_of(FaultPoint point) {
  if (is_of_hops(point)) return 1;  // the first call with messages
  const std::string name = to_string(point);
  if (name.starts_with("gather")) return kCallsOfStep - 1;  // the call of rows
  for (int i = 0; i < kCallsOfStep; ++i) {
    if (name.starts_with(to_string(kCalls[i]))) return i;
  }
  return -1;
}

// Whether the victim has posted the call before the fault. Then its peers miss it only in the next call, or
// in the next chunk of this call.
bool has_posted(FaultPoint point) {
  const std::string name = to_string(point);
  return !name.ends_with("_begin") && !name.ends_with("_sent") && !is_of_hops(point);
}

// Whether the victim has posted the call, but not its later chunks.
bool before_later_chunks(FaultPoint point) {
  const std::string name = to_string(point);
  return name.ends_with("_posted") || name.ends_with("_waited") || name.ends_with("_chunk_sent");
}

class Faults : public testing::TestWithParam<std::tuple<FaultPoint, Fault, bool, CallForm>> {
 protected:
  void SetUp() override {
    void* memory = mmap(nullptr, sizeof(Observation) * kRanks, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    observations_ = static_cast<Observation*>(memory);
    std::tie(fault_at, fault, processes_, form_) = GetParam();
    survivors_with_error = &with_error_;
    set_fault_hook(inject_fault);
  }
  void TearDown() override {
    set_fault_hook(nullptr);
    munmap(observations_, sizeof(Observation) * kRanks);
  }

  // Runs steps on every rank until the fault; then survivors call `afterwards`.
  void run(const std::function<void(Rank)>& afterwards) {
    const Topology topology(nodes_of(form_));
    Group group = processes_ ? Group::processes(topology) : Group::threads(topology);
    group.set_deadline(kDeadline);
    group.run([this, afterwards](const Rank& rank) {
      run_until_fault(rank);
      armed = false;
      if (rank.index() != kVictim) afterwards(rank);
    });
  }

  void run_until_fault(const Rank& rank) {
    Observation& observed = observations_[rank.index()];
    const test::Stopwatch watch;
    const auto record_error = [&](const auto& error) {
      if (rank.index() != kVictim) ++*with_error_;
      observed.code = error.code();
      observed.record = error.record;
      observed.victim_named = std::string(error.what()).find(str("rank ", kVictim)) != std::string::npos;
    };
    try {
      armed = fault_at == FaultPoint::construct_mapped;
      StepRunner runner(rank, form_, kDeadline);
      observed.calls_before = runner.prepare();
      armed = true;
      runner.run();
    } catch (const TimeoutError& error) {
      record_error(error);
    } catch (const PeerLostError& error) {
      record_error(error);
    }
    observed.seconds = watch.own_seconds();
  }

  // Checks the call in which a survivor missed the victim. A failure that is reported at once, by the victim
  // or by another survivor, may reach this one while it still waits in the call before.
  void expect_call(const Observation& observed) const {
    const bool chunk = form_ == CallForm::chunked && before_later_chunks(fault_at);
    const int call = call_of(fault_at) + (has_posted(fault_at) && !chunk ? 1 : 0);
    const WaitRecord& record = observed.record;
    const auto in_call = [&](int number) {
      return number >= 0 && record.operation == kCalls[number % kCallsOfStep] &&
             record.call == observed.calls_before + static_cast<std::uint64_t>(number) + 1;
    };
    EXPECT_TRUE(in_call(call) || (fault != Fault::stall && in_call(call - 1))) << describe(record);
    EXPECT_LT(record.observed, record.expected);
    if (fault == Fault::stall) {
      EXPECT_EQ(record.observed, record.expected - 1);
    }
    if (!chunk) {
      EXPECT_EQ(record.expected, record.call);
    } else if (fault == Fault::stall) {
      EXPECT_EQ(record.expected, 1u);  // the first chunk after the call header
    }
  }

  Observation* observations_ = nullptr;
  const test::SharedValue<std::atomic<int>> with_error_;
  bool processes_ = false;
  CallForm form_ = CallForm::fused;
};

TEST_P(Faults, EveryOtherRankGetsATypedErrorInTime) {
  try {
    run([](const Rank&) {});
    // run() rethrows what a rank threw. A rank that stalls throws nothing.
    EXPECT_EQ(fault, Fault::stall);
  } catch (const PeerLostError& error) {
    EXPECT_EQ(fault, Fault::kill) << error.what();
  } catch (const std::exception& error) {
    EXPECT_EQ(fault, Fault::raise) << error.what();
    EXPECT_NE(std::string(error.what()).find("injected"), std::string::npos) << error.what();
  }
  for (const int rank : {0, 2}) {
    SCOPED_TRACE(str("rank ", rank, " at ", to_string(fault_at)));
    const Observation& observed = observations_[rank];
    EXPECT_EQ(observed.code, fault == Fault::stall ? ErrorCode::timeout : ErrorCode::peer_lost);
    // A rank behind a relay that is late names it as the relay, which may itself be waiting; others as the
    // rank that they miss. Every rank passes on what the first of them has found.
    const bool late_relay = fault == Fault::stall && fault_at == FaultPoint::relay_holds;
    if (!late_relay || observed.record.via < 0) {
      EXPECT_EQ(observed.record.peer, kVictim);
    } else {
      EXPECT_EQ(observed.record.via, kVictim);
    }
    EXPECT_EQ(observed.record.rank, rank);
    const bool on_nodes = form_ == CallForm::two_hops && observed.record.operation != Operation::barrier;
    EXPECT_EQ(observed.record.node, on_nodes ? nodes_of(form_)[kVictim] : -1) << describe(observed.record);
    EXPECT_TRUE(observed.victim_named);
    expect_call(observed);
    EXPECT_LT(observed.seconds, fault == Fault::stall ? kDeadline + 1.0 : 1.0);
  }
}

TEST_P(Faults, SurvivorsBuildANewGroup) {
  const test::TestBootstrap meeting(kRanks - 1);
  try {
    run([&](const Rank& rank) {
      Group survivors = Group::custom(meeting.bootstrap(rank.index() > kVictim ? 1 : 0));
      survivors.run([&](const Rank& new_rank) {
        StepRunner runner(new_rank, form_, kNoFaultDeadline);
        runner.prepare();
        runner.run();
      });
      observations_[rank.index()].ran_in_new_group = true;
    });
  } catch (const std::exception&) {
    // the injected fault, which the test above checks
  }
  EXPECT_TRUE(observations_[0].ran_in_new_group);
  EXPECT_TRUE(observations_[2].ran_in_new_group);
}

std::string case_name(const testing::TestParamInfo<Faults::ParamType>& test) {
  std::string name = str(to_string(std::get<0>(test.param)), "_", name_of(std::get<1>(test.param)));
  if (std::get<3>(test.param) != CallForm::fused) name += str("_", name_of(std::get<3>(test.param)));
  std::replace_if(name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name;
}

// The points at which the call forms differ.
constexpr FaultPoint kPointsOfForms[] = {FaultPoint::dispatch_begin,    FaultPoint::dispatch_rows_sent,
                                         FaultPoint::dispatch_posted,   FaultPoint::dispatch_waited,
                                         FaultPoint::combine_rows_sent, FaultPoint::combine_posted,
                                         FaultPoint::combine_waited};

constexpr FaultPoint kPointsOfChunkedCalls[] = {
    FaultPoint::dispatch_posted, FaultPoint::dispatch_waited, FaultPoint::dispatch_chunk_sent,
    FaultPoint::combine_posted,  FaultPoint::combine_waited,  FaultPoint::combine_chunk_sent};

// In two hops a fused call posts in the wait, so those before it are like dispatch_begin.
constexpr FaultPoint kPointsOfTwoHops[] = {FaultPoint::dispatch_begin, FaultPoint::hop_begin,
                                           FaultPoint::relay_holds, FaultPoint::dispatch_waited,
                                           FaultPoint::combine_waited};

// The points that a call of one chunk and one hop passes.
std::vector<FaultPoint> points_of_unchunked_calls() {
  std::vector<FaultPoint> points = enumerators<FaultPoint>();
  std::erase_if(points, is_of_hops);
  std::erase(points, FaultPoint::dispatch_chunk_sent);
  std::erase(points, FaultPoint::combine_chunk_sent);
  return points;
}

auto chunked_cases(bool processes) {
  const auto faults = testing::Values(Fault::stall, processes ? Fault::kill : Fault::raise);
  return testing::Combine(testing::ValuesIn(kPointsOfChunkedCalls), faults, testing::Values(processes),
                          testing::Values(CallForm::chunked));
}

// With processes: peers report an exception of a relay between the hops as the loss of the relay.
auto two_hop_cases() {
  return testing::Combine(testing::ValuesIn(kPointsOfTwoHops), testing::Values(Fault::stall, Fault::kill),
                          testing::Values(true), testing::Values(CallForm::two_hops));
}

auto fused_cases(bool processes) {
  const auto faults = testing::Values(Fault::stall, processes ? Fault::kill : Fault::raise);
  return testing::Combine(testing::ValuesIn(points_of_unchunked_calls()), faults, testing::Values(processes),
                          testing::Values(CallForm::fused));
}

auto other_form_cases(bool processes) {
  const auto faults = testing::Values(Fault::stall, processes ? Fault::kill : Fault::raise);
  return testing::Combine(testing::ValuesIn(kPointsOfForms), faults, testing::Values(processes),
                          testing::Values(CallForm::split, CallForm::second_lane, CallForm::replay));
}

INSTANTIATE_TEST_SUITE_P(Threads, Faults, fused_cases(false), case_name);
INSTANTIATE_TEST_SUITE_P(Processes, Faults, fused_cases(true), case_name);
INSTANTIATE_TEST_SUITE_P(ChunkedCallsOfThreads, Faults, chunked_cases(false), case_name);
INSTANTIATE_TEST_SUITE_P(ChunkedCallsOfProcesses, Faults, chunked_cases(true), case_name);
INSTANTIATE_TEST_SUITE_P(TwoHopsOfProcesses, Faults, two_hop_cases(), case_name);
INSTANTIATE_TEST_SUITE_P(OtherFormsOfThreads, Faults, other_form_cases(false), case_name);
INSTANTIATE_TEST_SUITE_P(OtherFormsOfProcesses, Faults, other_form_cases(true), case_name);

}  // namespace
}  // namespace ferry
