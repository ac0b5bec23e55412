// What differs between backends because their messages travel in different ways: the call numbers that
// operations take, and where an error of a peer is thrown. Others are in CudaCapture (capture) and RelayWaits
// (deadlines by step).
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "harness/device.hpp"
#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

// A combine takes one number, also if topk_weights travel before its rows.
TEST_P(Contract, EveryCallTakesItsNumbers) {
  for (const WeightsFrom weights : {WeightsFrom::row_weights, WeightsFrom::topk_weights}) {
    TestCase c = small_case(1);
    c.ranks = 3;
    c.full = true;
    c.weights_from = weights;
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      const auto number_of_dispatch = [&] {
        DispatchRun dispatch(exchange, c, step);
        dispatch.run();
        const DispatchResult& received = dispatch.received();
        CombineRun(exchange, c, step, outputs, received.plan, received.weight).run();
        return received.host->call;
      };
      std::uint64_t next = number_of_dispatch();
      const auto require_next = [&](int numbers) {
        next += static_cast<std::uint64_t>(numbers);
        const std::uint64_t number = number_of_dispatch();
        require(number == next, "dispatch ", number, ", expected ", next);
      };
      require_next(2);
      exchange.metadata(3);
      // Over an engine on device memory kernels do not see the step metadata.
      require_next(GetParam().over_device_engine() ? 2 : 3);
    });
  }
}

// The weights are sent first, so a rank that refuses does so before its peers have begun with the rows.
TEST_P(Contract, ARefusalEndsACombineWhoseWeightsTravel) {
  TestCase c = small_case(1);
  c.ranks = 3;
  c.full = true;
  c.weights_from = WeightsFrom::topk_weights;
  c.reduction = Reduction::partial;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, step);
    dispatch.run();
    const std::uint64_t first = dispatch.received().host->call;
    const auto combine_of = [&](const DispatchResult& received) {
      return CombineRun(exchange, c, step, outputs, received.plan, received.weight);
    };
    CombineRun refused = combine_of(dispatch.received());
    if (rank.index() == 1) refused.result() = {};
    require_refused("result", [&] { refused.call(); });
    combine_of(dispatch.received()).run();
    DispatchRun next(exchange, c, step);
    next.run();
    require(next.received().host->call == first + 3, "dispatch ", next.received().host->call, " follows ",
            first);
  });
}

TEST_P(Contract, APeersRefusalIsThrownLateWhereKernelsFindIt) {
  const bool late = has_kernels(GetParam().backend);
  const TestCase c = small_case(1);
  run(2, describe(c), [&](Rank rank) {
    SyncExchange synchronous(rank, c.config);
    Exchange& exchange = synchronous;
    const Stream stream =
        GetParam().on_device() ? device::stream(device_number(rank, GetParam().backend)) : Stream{};
    const bool wrong = rank.index() == 1;
    std::string thrown = usage_error([&] { exchange.metadata(wrong ? -1 : 7, {.stream = stream}); });
    require(thrown.empty() == (late && !wrong), "the call throws '", thrown, "'");
    if (!wrong && late) thrown = usage_error([&] { exchange.synchronize({.stream = stream}); });
    require(thrown.find("a count of -1") != std::string::npos || wrong, "ends with '", thrown, "'");
    require(synchronous.metadata(7)->sum == 14, "the next call");
  });
}

}  // namespace
}  // namespace ferry::contract
