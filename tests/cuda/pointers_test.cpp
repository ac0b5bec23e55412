// Every pointer of every call in memory that kernels cannot access: the call is refused with the argument's
// name, and the exchange stays usable.
#include <algorithm>
#include <vector>

#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaPointers = DeviceTest;

// Ordinary host memory, large enough for every array of these tests.
class Pageable {
 public:
  template <class T>
  T* as() {
    return reinterpret_cast<T*>((reinterpret_cast<std::uintptr_t>(memory_.data()) + 255) / 256 * 256);
  }

 private:
  std::vector<std::byte> memory_ = std::vector<std::byte>(4 << 20);
};

// All ranks make the same mistake: each refuses its own call, and none waits for another.
class Refusals {
 public:
  Refusals(const Rank& rank, const TestCase& c)
      : exchange(rank, c.config), device_run(exchange, c), lane_(c.lane) {
    add_steps(device_run, c, 1);
  }

  template <class Call>
  void require_refused(const std::string& name, Call call) {
    const std::string text = usage_error(call);
    require(text.find(name + ":") != std::string::npos &&
                text.find("pageable host memory") != std::string::npos &&
                text.find("pinned") != std::string::npos,
            name, " in pageable memory: ", text.empty() ? "not refused" : text);
    exchange.synchronize({.lane = lane_, .stream = stream});
    device_run.run_and_compare(0, stream.get());  // the exchange is still usable
  }

  ferry::Exchange exchange;
  DeviceRun device_run;
  const TestStream stream;
  Pageable pageable;

 private:
  int lane_;
};

void dispatch_refused(Refusals& test, const std::string& name,
                      const std::function<void(Tokens&)>& change_tokens,
                      const std::function<void(DispatchOptions&)>& change_options = {}) {
  test.require_refused(name, [&] {
    Tokens tokens = test.device_run.tokens();
    DispatchOptions options = test.device_run.dispatch_options();
    if (change_tokens) change_tokens(tokens);
    options.call.stream = test.stream;
    if (change_options) change_options(options);
    test.exchange.dispatch(tokens, test.device_run.ids(), nullptr, options);
  });
}

TEST_F(CudaPointers, DispatchRefusesPageableMemory) {
  TestCase c = device_case(11, 2);
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    Refusals test(rank, c);
    Pageable& memory = test.pageable;
    dispatch_refused(test, "tokens", [&](Tokens& tokens) { tokens.parts[0] = memory.as<void>(); });
    dispatch_refused(test, "device_count",
                     [&](Tokens& tokens) { tokens.device_count = memory.as<std::int32_t>(); });
    test.require_refused("ids", [&] {
      test.exchange.dispatch(test.device_run.tokens(), memory.as<std::int32_t>(), nullptr,
                             {.call = {.stream = test.stream}});
    });
    test.require_refused("weights", [&] {
      test.exchange.dispatch(test.device_run.tokens(), test.device_run.ids(), memory.as<float>(),
                             {.call = {.stream = test.stream}});
    });
    const auto refused = [&](const std::string& name, const std::function<void(DispatchOptions&)>& change) {
      dispatch_refused(test, name, {}, change);
    };
    refused("dot_rows", [&](DispatchOptions& options) { options.dot_rows = memory.as<void>(); });
    refused("memory.parts[0]",
            [&](DispatchOptions& options) { options.memory.parts[0] = memory.as<void>(); });
    refused("memory.weight", [&](DispatchOptions& options) { options.memory.weight = memory.as<float>(); });
    refused("memory.group_of_row",
            [&](DispatchOptions& options) { options.memory.group_of_row = memory.as<std::int32_t>(); });
    refused("memory.plan", [&](DispatchOptions& options) { options.memory.plan = memory.as<void>(); });
    refused("memory.counts",
            [&](DispatchOptions& options) { options.memory.counts = memory.as<std::int32_t>(); });
    refused("memory.row_offsets",
            [&](DispatchOptions& options) { options.memory.row_offsets = memory.as<std::int32_t>(); });
    refused("memory.dots", [&](DispatchOptions& options) { options.memory.dots = memory.as<float>(); });
    refused("memory.count_sums",
            [&](DispatchOptions& options) { options.memory.count_sums = memory.as<std::int32_t>(); });
    const Plan plan = test.device_run.received().plan;
    test.require_refused("plan", [&] {
      test.exchange.dispatch(test.device_run.tokens(), Plan::over(memory.as<void>(), plan.bytes()), nullptr,
                             {.call = {.stream = test.stream}});
    });
  });
}

TEST_F(CudaPointers, OtherOperationsRefusePageableMemory) {
  TestCase c = device_case(12, 2);
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    Refusals test(rank, c);
    test.device_run.run_and_compare(0, test.stream.get());
    Pageable& memory = test.pageable;
    ferry::Exchange& exchange = test.exchange;
    const Plan plan = test.device_run.received().plan,
               bad_plan = Plan::over(memory.as<void>(), test.device_run.received().plan.bytes());
    const Outputs outputs = test.device_run.outputs();
    const Result result{test.device_run.result_memory().data()};
    const auto combine = [&](const Outputs& from, const Plan& by, const Result& to,
                             const CombineOptions& options) {
      CombineOptions on_stream = options;
      on_stream.call.stream = test.stream;
      return [&, from, by, to, on_stream] { exchange.combine(from, by, to, on_stream); };
    };
    test.require_refused("outputs", combine({memory.as<void>()}, plan, result, {}));
    test.require_refused("result", combine(outputs, plan, {memory.as<void>()}, {}));
    test.require_refused("plan", combine(outputs, bad_plan, result, {}));
    test.require_refused("row_weights", combine(outputs, plan, result, {.row_weights = memory.as<float>()}));
    test.require_refused("topk_weights",
                         combine(outputs, plan, result, {.topk_weights = memory.as<float>()}));
    const DeviceBytes values(1 << 20), more_values(1 << 20);
    test.require_refused("row_values",
                         combine(outputs, plan, result,
                                 {.row_values = memory.as<float>(), .route_values = values.as<float>()}));
    test.require_refused("route_values",
                         combine(outputs, plan, result,
                                 {.row_values = values.as<float>(), .route_values = memory.as<float>()}));
    test.require_refused("values", [&] {
      exchange.route_values(memory.as<float>(), plan, values.as<float>(), {.stream = test.stream});
    });
    test.require_refused("row_values", [&] {
      exchange.route_values(values.as<float>(), plan, memory.as<float>(), {.stream = test.stream});
    });
    test.require_refused("plan", [&] {
      exchange.route_values(values.as<float>(), bad_plan, more_values.as<float>(), {.stream = test.stream});
    });
    test.require_refused("row_values", [&] {
      exchange.return_values(memory.as<float>(), plan, values.as<float>(), {.stream = test.stream});
    });
    test.require_refused("route_values", [&] {
      exchange.return_values(values.as<float>(), plan, memory.as<float>(), {.stream = test.stream});
    });
    test.require_refused("device_count",
                         [&] { exchange.metadata(memory.as<std::int32_t>(), {.stream = test.stream}); });
  });
}

// Null values are seen on the device, which knows the numbers of tokens and rows.
TEST_F(CudaPointers, RouteValuesRefusesNullPointers) {
  TestCase c = device_case(13, 2);
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    Refusals test(rank, c);
    test.device_run.run_and_compare(0, test.stream.get());
    const Plan plan = test.device_run.received().plan;
    const DeviceBytes values(1 << 20);
    for (const bool null_values : {true, false}) {
      test.exchange.route_values(null_values ? nullptr : values.as<float>(), plan,
                                 null_values ? values.as<float>() : nullptr, {.stream = test.stream});
      const std::string text =
          usage_error([&] { test.exchange.synchronize({.lane = c.lane, .stream = test.stream}); });
      require(text.find("route_values") != std::string::npos, "null is not refused: ", text);
      test.device_run.run_and_compare(0, test.stream.get());
    }
    for (const bool null_values : {true, false}) {
      test.exchange.return_values(null_values ? nullptr : values.as<float>(), plan,
                                  null_values ? values.as<float>() : nullptr, {.stream = test.stream});
      const std::string text =
          usage_error([&] { test.exchange.synchronize({.lane = c.lane, .stream = test.stream}); });
      require(text.find("return_values") != std::string::npos, "null is not refused: ", text);
      test.device_run.run_and_compare(0, test.stream.get());
    }
  });
}

// A rank without tokens passes any address as weights, or null and says that the call has weights. Its result
// has them too.
TEST_F(CudaPointers, WeightsOfARankWithoutTokensMayBeAnyAddress) {
  TestCase c = device_case(14, 2);
  c.tokens = {0, 7};
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, 1);
    const TestStream stream;
    device_run.load(0, stream.get());
    device_run.poison_outputs(stream.get());
    Tokens tokens = device_run.tokens();
    tokens.device_count = nullptr;  // it holds the step's tokens, and a later call has none
    const float somewhere = 0;
    const DeviceBytes own(1 << 12);
    DispatchOptions options = device_run.dispatch_options();
    options.call.stream = stream;
    options.memory.weight = nullptr;
    for (const std::int64_t most : {7, 0}) {
      for (const bool null_weights : {false, true}) {
        if (rank.index() == 0) tokens.count = 0;
        tokens.count = std::min(tokens.count, most);
        options.weighted = null_weights && tokens.count == 0;
        const float* const any = tokens.count == 0 ? &somewhere : own.as<float>();
        const DispatchResult received =
            exchange.dispatch(tokens, device_run.ids(), options.weighted ? nullptr : any, options);
        exchange.synchronize({.lane = c.lane, .stream = stream});
        exchange.check(c.lane);
        require(received.weight != nullptr, "no weights, with at most ", most, " tokens on rank ",
                rank.index());
      }
    }
  });
}

}  // namespace
}  // namespace ferry::contract
