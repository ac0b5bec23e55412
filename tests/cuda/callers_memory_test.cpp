// Kinds of memory that callers may pass, refusal of rows in unusable memory, and limits of the configuration.
#include "backends/cuda/dispatch/dispatch.hpp"
#include "cuda/device_test.hpp"
#include "harness/sync_exchange.hpp"
#include "oracle/dispatch.hpp"

namespace ferry::contract {
namespace {

using CudaMemory = DeviceTest;

TEST_F(CudaMemory, OutputsMayLieInAnyDeviceMemory) {
  const TestCase c = device_case(1, 3);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, 1);
    const TestStream stream;
    device_run.run_and_compare(0, stream.get());
    const auto bytes = static_cast<std::size_t>(device_run.row_memory().bytes());
    // From a memory pool, and pinned on the host.
    void *pooled = nullptr, *pinned = nullptr;
    require_success(cudaMallocAsync(&pooled, bytes, stream.get()), "cudaMallocAsync");
    require_success(cudaHostAlloc(&pinned, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
                    "cudaHostAlloc");
    const void* own = device_run.outputs().data;
    for (void* memory : {pooled, pinned}) {
      require_success(cudaMemcpyAsync(memory, own, bytes - 16, cudaMemcpyDefault, stream.get()),
                      "cudaMemcpyAsync");
      device_run.outputs().data = memory;
      device_run.run_and_compare(0, stream.get());
    }
    stream.synchronize();
    require_success(cudaFree(pooled), "cudaFree");
    require_success(cudaFreeHost(pinned), "cudaFreeHost");
  });
}

// Experts that return their input: combine reads the rows where dispatch wrote them.
TEST_F(CudaMemory, OutputsMayAliasReceivedRows) {
  for (const bool lane_memory : {false, true}) {
    TestCase c = device_case(2, 2);
    c.reduction = c.config.reduction = Reduction::exact;
    run(c.ranks, c, [&](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun device_run(exchange, c);
      StepInputs step = make_inputs(c);
      oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
      for (int r = 0; r < c.ranks; ++r) {
        std::vector<std::byte>& rows = expert_outputs.ranks[static_cast<std::size_t>(r)].rows;
        std::fill(rows.begin(), rows.end(), kPoison);
        oracle::write_part(step.inputs, step.positions, r, 0, rows.data());
      }
      device_run.add_inputs(step, expert_outputs);
      if (lane_memory) device_run.dispatch_options().memory.parts[0] = nullptr;
      const TestStream stream;
      device_run.load(0, stream.get());
      device_run.poison_outputs(stream.get());
      device_run.dispatch(stream.get());
      device_run.outputs().data = device_run.received().data;
      device_run.combine(stream.get());
      exchange.synchronize({.lane = c.lane, .stream = stream});
      const std::vector<std::byte> expected =
          oracle::combined(c.config, step.positions, expert_outputs, rank.topology(), rank.index());
      std::vector<std::byte> got = device_run.result_memory().to_host();
      got.resize(expected.size());
      require_equal_bytes(got, expected, 2, "result");
    });
  }
}

// All ranks make the same mistake: each refuses its own call, and none waits for another.
TEST_F(CudaMemory, UnusableMemoryIsRefused) {
  TestCase c = device_case(3, 2);
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, 1);
    const TestStream stream;
    const auto require_refused = [&](const char* what, const auto& call) {
      const std::string text = usage_error([&] {
        call();
        exchange.synchronize({.lane = c.lane, .stream = stream});
      });
      require(!text.empty(), what, " was not refused");
      device_run.run_and_compare(0, stream.get());  // the exchange is still usable
    };
    const auto misaligned = [](auto* pointer) {
      return reinterpret_cast<decltype(pointer)>(reinterpret_cast<std::uintptr_t>(pointer) + 8);
    };
    require_refused("tokens at a misaligned address", [&] {
      Tokens tokens = device_run.tokens();
      tokens.parts[0] = misaligned(tokens.parts[0]);
      exchange.dispatch(tokens, device_run.ids(), nullptr, {.call = {.stream = stream}});
    });
    require_refused("null tokens", [&] {
      Tokens tokens = device_run.tokens();
      tokens.parts[0] = nullptr;
      exchange.dispatch(tokens, device_run.ids(), nullptr, {.call = {.stream = stream}});
    });
    require_refused("tokens in pageable memory", [&] {
      std::vector<std::byte> pageable(1 << 20);
      Tokens tokens = device_run.tokens();
      tokens.parts[0] =
          reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(pageable.data()) + 63) / 64 * 64);
      exchange.dispatch(tokens, device_run.ids(), nullptr, {.call = {.stream = stream}});
    });
    require_refused("null ids", [&] {
      exchange.dispatch(device_run.tokens(), static_cast<const std::int32_t*>(nullptr), nullptr,
                        {.call = {.stream = stream}});
    });
    require_refused("rows at a misaligned address", [&] {
      DispatchOptions options = device_run.dispatch_options();
      options.call.stream = stream;
      options.memory.parts[0] = misaligned(options.memory.parts[0]);
      exchange.dispatch(device_run.tokens(), device_run.ids(), nullptr, options);
    });
    require_refused("outputs at a misaligned address", [&] {
      device_run.dispatch(stream.get());
      exchange.combine({misaligned(device_run.outputs().data)}, device_run.received().plan,
                       {device_run.result_memory().data()}, {.call = {.stream = stream}});
    });
    require_refused("a result at a misaligned address", [&] {
      device_run.dispatch(stream.get());
      exchange.combine(device_run.outputs(), device_run.received().plan,
                       {misaligned(device_run.result_memory().data())}, {.call = {.stream = stream}});
    });
  });
}

// The size query needs no device.
TEST(CudaSizes, OversizedConfigurationsAreUnsupported) {
  const Config fits{
      .experts = 1024, .top_k = 8, .hidden = 16, .max_tokens = 1 << 18, .backend = BackendKind::cuda};
  EXPECT_NO_THROW(size_of(fits, 33, 0));
  EXPECT_THROW(size_of(fits, 257, 0), UnsupportedError);
  Config config = fits;
  config.experts = 1025;
  EXPECT_THROW(size_of(config, 32, 0), UnsupportedError);
  config.experts = 1022;
  config.shared_experts = 2;
  EXPECT_NO_THROW(size_of(config, 32, 0));
  config.shared_experts = 3;
  EXPECT_THROW(size_of(config, 32, 0), UnsupportedError);
  config = fits;
  config.max_tokens = (1 << 18) + 1;
  EXPECT_THROW(size_of(config, 2, 0), UnsupportedError) << "routes";
  config.top_k = 1;
  EXPECT_NO_THROW(size_of(config, 2, 0));
  config.max_tokens = (1 << 20) - 1;
  EXPECT_NO_THROW(size_of(config, 2, 0));
  config.max_tokens = 1 << 20;
  EXPECT_THROW(size_of(config, 2, 0), UnsupportedError) << "tokens";
  config = fits;
  config.max_tokens = 1;
  config.format = Format::raw({1 << 29, 1 << 29});
  EXPECT_NO_THROW(size_of(config, 2, 0));
  config.format = Format::raw({1 << 29, 1 << 29, 16});
  EXPECT_THROW(size_of(config, 2, 0), UnsupportedError) << "bytes";
}

// A block has at most 227 KiB of shared memory on Hopper GPUs.
TEST(CudaSizes, TablesOfMaxExpertsFitSharedMemory) {
  for (const int ranks : {1, 2, 4, 8, 16, 32}) {
    cuda::LaneView lane{};
    lane.ranks = ranks;
    lane.experts = cuda::kMaxExperts;
    lane.groups = cuda::kMaxExperts / ranks;
    lane.signals = DeviceSignals::of({ranks, lane.experts, 4096, 8, 4096, 16384});
    EXPECT_LE(cuda::dispatch_shared_bytes(lane), 227 * 1024) << ranks << " ranks";
  }
}

}  // namespace
}  // namespace ferry::contract
