// Calls that ask about an exchange while its calls are captured in a CUDA graph.
#include <array>
#include <functional>
#include <string>
#include <thread>

#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaCapture = DeviceTest;

constexpr int kReplays = 3;

// check(), load_counts() and wire_counts() report the calls that have run. synchronize() is refused. The
// capture goes on, in the strictest mode, and the graph works.
TEST_F(CudaCapture, QueriesDuringACaptureLeaveItValid) {
  const TestCase c = device_case(4, 2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, kReplays);
    const TestStream stream;
    device_run.run_and_compare(0, stream.get());
    rank.barrier();  // no rank may allocate while another captures
    const Graph graph(stream.get(), [&] {
      device_run.dispatch(stream.get());
      exchange.check(c.lane);
      require_equal(exchange.load_counts().dispatches, std::int64_t{1}, "dispatches that have run");
      exchange.wire_counts();
      const std::string message =
          usage_error([&] { exchange.synchronize({.lane = c.lane, .stream = stream}); });
      require(message.find("captured") != std::string::npos, "synchronize() was not refused: ", message);
      device_run.combine(stream.get());
    });
    rank.barrier();
    for (int set = 0; set < kReplays; ++set) {
      device_run.load(set, stream.get());
      device_run.poison_outputs(stream.get());
      graph.launch(stream.get());
      device_run.compare(set, stream.get());
      exchange.check(c.lane);
    }
    require_equal(exchange.load_counts().dispatches, std::int64_t{1 + kReplays}, "dispatches that have run");
  });
}

// While another thread captures, too.
TEST_F(CudaCapture, OtherThreadsQueryDuringACapture) {
  const TestCase c = device_case(5, 2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, 1);
    const TestStream stream;
    device_run.run_and_compare(0, stream.get());
    rank.barrier();
    const Graph graph(stream.get(), [&] {
      device_run.dispatch(stream.get());
      std::vector<std::thread> threads;
      std::array<std::int64_t, 2> dispatches{};
      for (std::int64_t& count : dispatches)
        threads.emplace_back([&] { count = exchange.load_counts().dispatches; });
      for (std::thread& thread : threads) thread.join();
      for (const std::int64_t count : dispatches) require_equal(count, std::int64_t{1}, "dispatches");
      device_run.combine(stream.get());
    });
    rank.barrier();
    device_run.poison_outputs(stream.get());
    graph.launch(stream.get());
    device_run.compare(0, stream.get());
  });
}

// check() runs while calls find bad ids: every bad id is reported once.
TEST_F(CudaCapture, ChecksDuringCallsLoseNoBadId) {
  constexpr int kCalls = 400;
  TestCase c = device_case(6, 2);
  c.bad_ids = 0.3;
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    const StepInputs step = make_inputs(c);
    const int set = device_run.add_inputs(step, make_expert_outputs(c, step));
    const TestStream stream;
    device_run.load(set, stream.get());
    std::int64_t reported = 0;
    const auto check = [&] {
      try {
        exchange.check(c.lane);
      } catch (const BadIdError& error) {
        reported += error.bad.count;
      }
    };
    for (int call = 0; call < kCalls; ++call) {
      device_run.dispatch(stream.get());
      check();
      if (call % 50 == 49) stream.synchronize();  // a launch on a full stream blocks
    }
    stream.synchronize();
    check();
    require_equal(reported, kCalls * step.positions.bad_ids[static_cast<std::size_t>(rank.index())].count,
                  "bad ids reported");
  });
}

// The host reads how much it receives. The rank that captures is told so, and so are its peers, which do not
// wait for it; the exchange stays usable.
void refuse_captures_over_an_engine(TestCase c, const contract::Setup& setup) {
  constexpr std::int64_t kRowBytes = 16;
  setup.choose_backend(c.config);
  const auto body = [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    const bool captures = rank.index() == 1;
    const DeviceBytes row(std::vector<std::byte>(kRowBytes, static_cast<std::byte>(rank.index()))),
        all(c.ranks * kRowBytes), ids(bytes_of_values(std::vector<std::int32_t>(4))),
        tokens(c.config.hidden * 2);
    const TestStream stream;
    const Stream on{stream.get()};
    const auto gather = [&] {
      exchange.all_gather_v({.rows = row.data(),
                             .count = 1,
                             .row_bytes = kRowBytes,
                             .gathered = all.data(),
                             .capacity = c.ranks},
                            {.stream = on});
    };
    const auto dispatch = [&] {
      exchange.dispatch(Tokens::rows(tokens.data(), 1), ids.as<std::int32_t>(), nullptr,
                        {.call = {.stream = on}});
    };
    const auto require_refused = [&](const std::function<void()>& call) {
      std::string text;
      if (captures) {
        require_success(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeRelaxed),
                        "cudaStreamBeginCapture");
      }
      try {
        call();
      } catch (const UnsupportedError& error) {
        text = error.what();
      }
      if (captures) {
        cudaGraph_t graph = nullptr;
        require_success(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
        cudaGraphDestroy(graph);
      }
      require(text.find("cannot be captured into a CUDA graph") != std::string::npos,
              str("rank ", rank.index(), " gets '", text, "'"));
      require(captures || text.find("rank 1 refused") != std::string::npos, text);
      gather();
      exchange.synchronize({.stream = on});
      std::vector<std::byte> expected;
      for (int r = 0; r < c.ranks; ++r) expected.insert(expected.end(), kRowBytes, static_cast<std::byte>(r));
      require(all.to_host() == expected, "other rows than expected");
    };
    const auto in_phases = [&] {
      exchange.dispatch_send(Tokens::rows(tokens.data(), 1), ids.as<std::int32_t>(), nullptr,
                             {.call = {.stream = on}});
      exchange.dispatch_receive({.stream = on});
    };
    require_refused(gather);
    require_refused(dispatch);
    require_refused(in_phases);
    require_refused(rank.index() == 2 ? std::function<void()>(in_phases) : dispatch);
  };
  run_ranks(setup, c.ranks, describe(c), body, c.nodes);
}

TEST_F(CudaCapture, OverAnEngineIsRefusedOnEveryRank) {
  TestCase c = device_case(6, 3);
  refuse_captures_over_an_engine(c, device_collective_setups().front());
  c.nodes = {0, 0, 1};
  refuse_captures_over_an_engine(c, device_collective_setups().back());  // in two hops
}

}  // namespace
}  // namespace ferry::contract
