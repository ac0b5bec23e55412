// Calls that the ranks make in different ways: in phases and fused, with lanes in other orders, and by ranks
// of which some refuse or pass other options.
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

constexpr int kLanes = 3;

// Dispatches and combines of all lanes of an exchange, in phases.
class LanesInPhases {
 public:
  // `cases` and `steps`: of each lane.
  LanesInPhases(SyncExchange& exchange, const std::vector<TestCase>& cases,
                const std::vector<StepInputs>& steps, const std::vector<oracle::ExpertOutputs>& outputs) {
    for (std::size_t lane = 0; lane < cases.size(); ++lane)
      dispatches_.emplace_back(exchange, cases[lane], steps[lane]);
    combine_of_ = [&](int lane) {
      const auto at = static_cast<std::size_t>(lane);
      const DispatchResult& rows = dispatches_[at].received();
      combines_.emplace_back(exchange, cases[at], steps[at], outputs[at], rows.plan, rows.weight);
    };
  }

  DispatchRun& dispatch(int lane) { return dispatches_[static_cast<std::size_t>(lane)]; }
  // Once all lanes have received their rows.
  void make_combines() {
    for (int lane = 0; lane < kLanes; ++lane) combine_of_(lane);
  }
  CombineRun& combine(int lane) { return combines_[static_cast<std::size_t>(lane)]; }

 private:
  std::deque<DispatchRun> dispatches_;  // deque: addresses stay
  std::deque<CombineRun> combines_;
  std::function<void(int lane)> combine_of_;
};

// The inputs and experts' outputs of kLanes lanes.
struct LaneInputs {
  std::vector<TestCase> cases;
  std::vector<StepInputs> steps;
  std::vector<oracle::ExpertOutputs> outputs;

  explicit LaneInputs(const TestCase& c) : cases(kLanes, c) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto at = static_cast<std::size_t>(lane);
      cases[at].lane = lane;
      steps.push_back(make_inputs(c, lane));
      outputs.push_back(make_expert_outputs(c, steps[at]));
    }
  }
};

TestCase lanes_case(TestCase c, int ranks) {
  c.ranks = ranks;
  c.config.lanes = kLanes;
  return c;
}

// The lanes in the order in which this rank takes them: another one on every rank.
std::vector<int> own_order(const Rank& rank) {
  std::vector<int> order;
  for (int i = 0; i < kLanes; ++i) order.push_back((rank.index() + i) % kLanes);
  return order;
}

// All ranks have sent on all lanes before any receives.
TEST_P(Contract, LanesAreReceivedInAnotherOrderOnEveryRank) {
  if (has_kernels(GetParam().backend) && GetParam().hops == Hops::two)
    GTEST_SKIP()
        << "a lane's receive phase waits for those of the other ranks; CudaLanes gives each lane a stream";
  for (const int ranks : {2, 3}) {
    const TestCase c = lanes_case(small_case(ranks), ranks);
    const LaneInputs inputs(c);
    run(ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      for (int repeat = 0; repeat < 5; ++repeat) {
        LanesInPhases lanes(exchange, inputs.cases, inputs.steps, inputs.outputs);
        for (int lane = 0; lane < kLanes; ++lane) lanes.dispatch(lane).send();
        rank.barrier();
        for (const int lane : own_order(rank)) lanes.dispatch(lane).receive();
        lanes.make_combines();
        for (int lane = 0; lane < kLanes; ++lane) lanes.combine(lane).send();
        rank.barrier();
        for (const int lane : own_order(rank)) lanes.combine(lane).receive();
        for (int lane = 0; lane < kLanes; ++lane) {
          lanes.dispatch(lane).compare();
          lanes.combine(lane).compare();
        }
      }
    });
  }
}

// NCCL needs the sends of all lanes in one order: another one is refused on every rank.
TEST_P(Contract, LanesAreSentInAnotherOrderOnEveryRank) {
  const bool ordered = GetParam().engine == EngineKind::nccl;
  for (const int ranks : {2, 3}) {
    const TestCase c = lanes_case(small_case(ranks), ranks);
    const LaneInputs inputs(c);
    run(ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      for (int repeat = 0; repeat < 5; ++repeat) {
        LanesInPhases lanes(exchange, inputs.cases, inputs.steps, inputs.outputs);
        for (const int lane : own_order(rank)) lanes.dispatch(lane).send();
        rank.barrier();
        for (int lane = 0; lane < kLanes; ++lane) {
          const std::string error = usage_error([&] { lanes.dispatch(lane).receive(); });
          require((error.find("the same order on all ranks") != std::string::npos) == ordered, "lane ", lane,
                  " ends with '", error, "'");
          if (!ordered) lanes.dispatch(lane).compare();
        }
        for (std::size_t lane = 0; lane < kLanes; ++lane)
          dispatch_and_combine(exchange, inputs.cases[lane], inputs.steps[lane], inputs.outputs[lane]);
      }
    });
  }
}

// What ends a call on every rank.
enum class Mistake {
  refused,       // one rank refuses the call
  differs,       // one rank has other options
  both,          // one refuses, another one differs
  two_refusals,  // two ranks refuse
};

constexpr Mistake kMistakes[] = {Mistake::refused, Mistake::differs, Mistake::both, Mistake::two_refusals};

// A call of which every rank knows whether it refuses it, passes other options, and makes it in phases.
struct MixedCall {
  Mistake mistake;
  int culprit, split_ranks;  // a bit for each rank
  int ranks;

  int second() const { return (culprit + 1) % ranks; }
  bool refuses(int rank) const {
    if (mistake == Mistake::differs) return false;
    return rank == culprit || (mistake == Mistake::two_refusals && rank == second());
  }
  bool differs(int rank) const {
    return (mistake == Mistake::differs && rank == culprit) || (mistake == Mistake::both && rank == second());
  }
  bool split(int rank) const { return (split_ranks >> rank & 1) != 0; }
};

// Runs a call in one of the forms and returns the first error. A rank whose send phase was not refused by
// itself also makes the receive phase: kernels may report what ended the call already before it.
template <class Run>
std::string error_of(const MixedCall& call, int rank, Run& run) {
  if (!call.split(rank)) return usage_error([&] { run.call(); });
  const std::string sent = usage_error([&] { run.send(); });
  if (call.refuses(rank)) return sent;
  const std::string received = usage_error([&] { run.receive(); });
  return sent.empty() ? received : sent;
}

// Makes calls with every mistake, in phases on every set of ranks.
void make_mistakes(const Setup& setup, TestCase c) {
  c.full = true;
  c.config.reduction = c.reduction = Reduction::exact;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  const auto body = [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    Plan plan = dispatch_and_combine(exchange, c, step, expert_outputs);
    GuardedBuffer unreduced(std::int64_t{c.config.max_tokens} * c.config.top_k * c.config.hidden * 2);
    Random random(c.seed);  // the same on all ranks
    for (int split_ranks = 0; split_ranks < 1 << c.ranks; ++split_ranks) {
      for (const Mistake mistake : kMistakes) {
        const MixedCall call{mistake, random.below(c.ranks), split_ranks, c.ranks};
        const bool refuses = call.refuses(rank.index()), differs = call.differs(rank.index());
        const auto require_ended = [&](const char* what, const std::string& error, const char* refusal,
                                       const char* difference) {
          const bool named = error.find(refusal) != std::string::npos;
          const bool expected = mistake == Mistake::differs
                                    ? error.find(difference) != std::string::npos
                                    : named || (mistake == Mistake::both && !refuses &&
                                                error.find(difference) != std::string::npos);
          require(expected, what, " of mistake ", static_cast<int>(mistake), " by rank ", call.culprit,
                  ", phases on ranks ", split_ranks, ", ends with '", error, "'");
        };
        DispatchRun dispatch(exchange, c, step);
        if (refuses) dispatch.tokens().count = c.config.max_tokens + 1;
        if (differs) dispatch.options().format = Format::fp8_e4m3();
        require_ended("a dispatch", error_of(call, rank.index(), dispatch), "max_tokens", "format is ");
        CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
        combine.options().row_weights = nullptr;
        if (refuses) combine.options().reduction = static_cast<Reduction>(9);
        if (differs) {
          combine.options().reduction = Reduction::unreduced;
          combine.result().data = unreduced.data();
        }
        require_ended("a combine", error_of(call, rank.index(), combine), "reduction = 9", "reduction is ");
        plan = dispatch_and_combine(exchange, c, step, expert_outputs);
      }
    }
  };
  run_ranks(setup, c.ranks, describe(c), body);
}

TEST_P(Contract, MistakesEndCallsInPhasesAndFused) {
  for (const int ranks : {2, 3}) {
    TestCase c = small_case(ranks);
    c.ranks = ranks;
    make_mistakes(GetParam(), c);
  }
}

}  // namespace
}  // namespace ferry::contract
