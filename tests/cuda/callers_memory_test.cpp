// Where the caller's memory may lie, and what is refused.
#include "backends/cuda/dispatch/dispatch.hpp"
#include "cuda/device_test.hpp"
#include "harness/sync_exchange.hpp"
#include "oracle/dispatch.hpp"

namespace ferry::contract {
namespace {

using CudaMemory = OnDevices;

void play_once(DeviceRun& play, cudaStream_t stream) {
  play.use(0, stream);
  play.poison(stream);
  play.dispatch(stream);
  play.combine(stream);
  play.compare(0, stream);
}

TEST_F(CudaMemory, OutputsMayLieInAnyDeviceMemory) {
  const Case c = device_case(1, 3);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play(exchange, c);
    keep_steps(play, c, 1);
    const OwnStream stream;
    play_once(play, stream.get());
    const auto bytes = static_cast<std::size_t>(play.row_memory().bytes());
    // Of a pool, and pinned on the host.
    void *pooled = nullptr, *pinned = nullptr;
    require_success(cudaMallocAsync(&pooled, bytes, stream.get()), "cudaMallocAsync");
    require_success(cudaHostAlloc(&pinned, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
                    "cudaHostAlloc");
    const void* own = play.outputs().data;
    for (void* memory : {pooled, pinned}) {
      require_success(cudaMemcpyAsync(memory, own, bytes - 16, cudaMemcpyDefault, stream.get()),
                      "cudaMemcpyAsync");
      play.outputs().data = memory;
      play_once(play, stream.get());
    }
    stream.synchronize();
    require_success(cudaFree(pooled), "cudaFree");
    require_success(cudaFreeHost(pinned), "cudaFreeHost");
  });
}

// The expert that does nothing: rows come home from where they arrived.
TEST_F(CudaMemory, OutputsMayBeTheArrivalsThemselves) {
  for (const bool lanes_own : {false, true}) {
    Case c = device_case(2, 2);
    c.reduction = c.config.reduction = Reduction::exact;
    run(c.ranks, c, [&](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun play(exchange, c);
      Step step = make_step(c);
      oracle::Outcome outcome = make_outcome(c, step);
      for (int r = 0; r < c.ranks; ++r) {
        std::vector<std::byte>& rows = outcome.ranks[static_cast<std::size_t>(r)].rows;
        std::fill(rows.begin(), rows.end(), kPoison);
        oracle::write_part(step.global, step.positions, r, 0, rows.data());
      }
      play.keep(step, outcome);
      if (lanes_own) play.dispatch_options().memory.parts[0] = nullptr;
      const OwnStream stream;
      play.use(0, stream.get());
      play.poison(stream.get());
      play.dispatch(stream.get());
      play.outputs().data = play.received().data;
      play.combine(stream.get());
      exchange.synchronize(c.lane, stream);
      const std::vector<std::byte> expected =
          oracle::combined(c.config, step.positions, outcome, rank.index());
      std::vector<std::byte> got = play.result_memory().on_host();
      got.resize(expected.size());
      require_equal_bytes(got, expected, 2, "result");
    });
  }
}

// Each rank makes the same mistake, so that each refuses its own call.
TEST_F(CudaMemory, MemoryThatCannotBeUsedIsRefused) {
  Case c = device_case(3, 2);
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play(exchange, c);
    keep_steps(play, c, 1);
    const OwnStream stream;
    const auto refused = [&](const char* what, const auto& call) {
      try {
        call();
        exchange.synchronize(c.lane, stream);
      } catch (const UsageError&) {
        return play_once(play, stream.get());  // as usable as before
      }
      require(false, what, " was not refused");
    };
    const auto off = [](auto* pointer) {
      return reinterpret_cast<decltype(pointer)>(reinterpret_cast<std::uintptr_t>(pointer) + 8);
    };
    refused("tokens at an odd address", [&] {
      Tokens tokens = play.tokens();
      tokens.parts[0] = off(tokens.parts[0]);
      exchange.dispatch(tokens, play.ids(), nullptr, {}, stream);
    });
    refused("tokens nowhere", [&] {
      Tokens tokens = play.tokens();
      tokens.parts[0] = nullptr;
      exchange.dispatch(tokens, play.ids(), nullptr, {}, stream);
    });
    refused("tokens in memory that devices do not reach", [&] {
      std::vector<std::byte> pageable(1 << 20);
      Tokens tokens = play.tokens();
      tokens.parts[0] =
          reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(pageable.data()) + 63) / 64 * 64);
      exchange.dispatch(tokens, play.ids(), nullptr, {}, stream);
    });
    refused("ids nowhere", [&] {
      exchange.dispatch(play.tokens(), static_cast<const std::int32_t*>(nullptr), nullptr, {}, stream);
    });
    refused("rows at an odd address", [&] {
      DispatchOptions options = play.dispatch_options();
      options.memory.parts[0] = off(options.memory.parts[0]);
      exchange.dispatch(play.tokens(), play.ids(), nullptr, options, stream);
    });
    refused("outputs at an odd address", [&] {
      play.dispatch(stream.get());
      exchange.combine({off(play.outputs().data)}, play.received().plan, {play.result_memory().data()}, {},
                       stream);
    });
    refused("a result at an odd address", [&] {
      play.dispatch(stream.get());
      exchange.combine(play.outputs(), play.received().plan, {off(play.result_memory().data())}, {}, stream);
    });
  });
}

// A capture cannot wait: asked to, the exchange throws, and goes on as before.
TEST_F(CudaMemory, WaitingInsideACaptureIsAnError) {
  const Case c = device_case(4, 2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play(exchange, c);
    keep_steps(play, c, 1);
    const OwnStream stream;
    rank.barrier();
    require_success(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                    "cudaStreamBeginCapture");
    bool refused = false;
    try {
      exchange.synchronize(c.lane, stream);
    } catch (const ferry::Error&) {
      refused = true;
    }
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream.get(), &graph);  // what it says: the capture is no more
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
    require(refused, "synchronize() inside a capture threw nothing");
    rank.barrier();
    play_once(play, stream.get());
  });
}

// The size query needs no device, so this runs anywhere.
TEST(ContractOfCuda, MemoryStaysWithinItsBound) {
  for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
    constexpr int kRanks = 8;
    Config config{
        .experts = 256, .top_k = 8, .hidden = 7168, .max_tokens = 4096, .backend = BackendKind::cuda};
    config.reduction = reduction;
    const Sizes sizes = size_of(config, kRanks, 3);
    const double bound = 2 * (kRanks * 4096.0 * 7168 * 2 + 4096.0 * 8 * 7168 * 2);
    const auto symmetric =
        static_cast<double>(sizes.dispatch_staging + sizes.combine_staging + sizes.signals);
    EXPECT_LE(symmetric, 1.05 * bound);
    EXPECT_GE(symmetric, bound);
  }
}

// So does what the backend cannot take.
TEST(ContractOfCuda, WhatIsTooMuchIsUnsupported) {
  const Config fits{
      .experts = 1024, .top_k = 8, .hidden = 16, .max_tokens = 1 << 18, .backend = BackendKind::cuda};
  EXPECT_NO_THROW(size_of(fits, 32, 0));
  EXPECT_THROW(size_of(fits, 33, 0), UnsupportedError);
  Config config = fits;
  config.experts = 1025;
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

// A block has 227 KB of shared memory on the devices of the Hopper generation.
TEST(ContractOfCuda, TablesOfTheMostExpertsFitABlock) {
  for (const int ranks : {1, 2, 4, 8, 16, 32}) {
    cuda::LaneView lane{};
    lane.ranks = ranks;
    lane.experts = cuda::kMaxExperts;
    lane.groups = cuda::kMaxExperts / ranks;
    lane.signals = DeviceSignals::of(ranks, lane.experts, 4096, 8, 4096, 16384);
    EXPECT_LE(cuda::dispatch_shared_bytes(lane), 227 * 1024) << ranks << " ranks";
  }
}

}  // namespace
}  // namespace ferry::contract
