// What calls of the backend nvshmem take between two nodes of one rank, each on a GPU of its own. Printed,
// beside
//   4,096 tokens   NVSHMEM's own puts, with as many blocks, in the same run
//   128 tokens     the same calls by plain stores: the backend cuda, in two hops and in one
//   few tokens     the same calls in two hops
// Not a test of correctness: exchange_test.cpp is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "backends/nvshmem/session.hpp"
#include "cuda/device_resources.hpp"
#include "cuda/nvshmem/message_checks.hpp"
#include "ferry/exchange.hpp"

namespace ferry::test {
namespace {

using contract::DeviceBytes;

constexpr int kExperts = 256, kTopK = 8, kHidden = 7168, kBlocks = 24;
constexpr double kDeadline = 5;  // seconds

template <class T>
DeviceBytes on_device(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return DeviceBytes(bytes);
}

// Distinct experts for each token.
std::vector<std::int32_t> draw_ids(int rank, int tokens) {
  std::mt19937 random(static_cast<unsigned>(rank + 1));
  std::vector<std::int32_t> all(kExperts), ids;
  for (int expert = 0; expert < kExperts; ++expert) all[static_cast<std::size_t>(expert)] = expert;
  for (int token = 0; token < tokens; ++token) {
    for (int k = 0; k < kTopK; ++k) {
      const auto other = static_cast<std::size_t>(k) + random() % static_cast<unsigned>(kExperts - k);
      std::swap(all[static_cast<std::size_t>(k)], all[other]);
      ids.push_back(all[static_cast<std::size_t>(k)]);
    }
  }
  return ids;
}

struct Shape {
  BackendKind backend;
  Hops hops;
  int tokens;
  Format format;
  Layout layout;
  int sm_limit;
  int window = 0;  // Config::window
};

// Seconds of a call, and the bytes that this rank sends to the other node in it.
struct Times {
  double dispatch, pair, dispatch_send, combine_send;  // the last two: send phases alone
  std::int64_t dispatch_bytes, combine_bytes;
};

// Time of work on a stream between begin() and seconds(), which waits for it.
class PhaseTimer {
 public:
  explicit PhaseTimer(cudaStream_t stream) : stream_(stream) {
    cuda::check(cudaEventCreate(&begun_), "make an event");
    cuda::check(cudaEventCreate(&done_), "make an event");
  }
  ~PhaseTimer() {
    cudaEventDestroy(begun_);
    cudaEventDestroy(done_);
  }
  void begin() { cuda::check(cudaEventRecord(begun_, stream_), "record an event"); }
  double seconds() {
    cuda::check(cudaEventRecord(done_, stream_), "record an event");
    cuda::check(cudaEventSynchronize(done_), "wait for an event");
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, begun_, done_), "read the time");
    return milliseconds * 1e-3;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begun_{}, done_{};
};

// Seconds of one of `calls` calls that follow one another on a stream.
double seconds_of(const Rank& rank, cudaStream_t stream, int calls, const std::function<void()>& call) {
  for (int warm = 0; warm < 3; ++warm) call();
  cuda::check(cudaStreamSynchronize(stream), "wait for a stream");
  rank.barrier();
  PhaseTimer timer(stream);
  timer.begin();
  for (int i = 0; i < calls; ++i) call();
  return timer.seconds() / calls;
}

Times times_of(const Rank& rank, const Shape& shape) {
  const int calls = shape.tokens > 1000 ? 10 : 50;
  Exchange exchange(rank, {.experts = kExperts,
                           .top_k = kTopK,
                           .hidden = kHidden,
                           .max_tokens = shape.tokens,
                           .backend = shape.backend,
                           .hops = shape.hops,
                           .window = shape.window,
                           .layout = shape.layout,
                           .format = shape.format,
                           .reduction_level = shape.backend == BackendKind::cuda && shape.hops == Hops::one
                                                  ? ReductionLevel::rank
                                                  : ReductionLevel::automatic,
                           .deadline = kDeadline});
  const TestStream stream;
  const Stream handle{stream.get()};
  const std::int64_t row = std::int64_t{kHidden} * 2;
  const DeviceBytes tokens(shape.tokens * row), result(shape.tokens * row),
      outputs(exchange.capacity() * row),
      ids = on_device(draw_ids(rank.index(), shape.tokens)),
      weights = on_device(std::vector<float>(static_cast<std::size_t>(shape.tokens * kTopK), 0.125f));
  const bool by_expert = shape.layout != Layout::rank_major;
  const CallOptions on{.stream = handle, .sm_limit = shape.sm_limit};
  DispatchResult received;
  const auto dispatch = [&] {
    received = exchange.dispatch(Tokens::rows(tokens.data(), shape.tokens), ids.as<std::int32_t>(),
                                 weights.as<float>(), {.call = on});
  };
  const auto combine = [&] {
    exchange.combine({.data = outputs.data()}, received.plan, {.data = result.data()},
                     {.call = on, .row_weights = by_expert ? received.weight : nullptr});
  };
  Times times{};
  times.dispatch = seconds_of(rank, stream.get(), calls, dispatch);
  const WireCounts before = exchange.wire_counts();
  times.pair = seconds_of(rank, stream.get(), calls, [&] {
    dispatch();
    combine();
  });
  const WireCounts after = exchange.wire_counts();
  const DispatchOptions dispatch_options{.call = on};
  const CombineOptions combine_options{.call = on, .row_weights = by_expert ? received.weight : nullptr};
  const Tokens rows = Tokens::rows(tokens.data(), shape.tokens);
  PhaseTimer timer(stream.get());
  for (int i = 0; i < calls; ++i) {
    timer.begin();
    exchange.dispatch_send(rows, ids.as<std::int32_t>(), weights.as<float>(), dispatch_options);
    times.dispatch_send += timer.seconds() / calls;
    received = exchange.dispatch_receive({.stream = handle});
    timer.begin();
    exchange.combine_send({.data = outputs.data()}, received.plan, {.data = result.data()}, combine_options);
    times.combine_send += timer.seconds() / calls;
    exchange.combine_receive({.stream = handle});
  }
  const std::int64_t all = calls + 3;
  times.dispatch_bytes = (after.between_nodes.dispatch_bytes - before.between_nodes.dispatch_bytes) / all;
  times.combine_bytes = (after.between_nodes.combine_bytes - before.between_nodes.combine_bytes) / all;
  exchange.synchronize({.stream = handle});
  exchange.check();
  return times;
}

// Bytes per second out of each rank by puts of whole rows, both ranks at once.
double rate_of_puts(const Rank& rank) {
  Session session(rank, 30);
  const cuda::MessageCheckLayout layout{rank.size(), kBlocks * 8 / 2, 8, kHidden * 2};
  Checks checks(rank, session, layout);
  constexpr std::int64_t kMessages = 400;  // of a channel
  Found found{};
  for (int round = 0; round < 3; ++round)
    found = checks.run(kMessages, false, blocks_of(layout), 4, [](int) { return true; });
  FERRY_CHECK(found.ended == 0, "messages");
  return static_cast<double>(kMessages) * layout.channels * layout.bytes / found.milliseconds * 1e3;
}

void print(const Rank& rank, const char* what, double seconds, const char* beside, double other,
           double target) {
  if (rank.index() != 0) return;
  std::printf("%-52s %9.1f us; %s %9.1f us; ratio %.2f (target %.2f)\n", what, seconds * 1e6, beside,
              other * 1e6, seconds / other, target);
  std::fflush(stdout);
}

TEST(NvshmemRate, OfTwoNodesOfOneRank) {
  FERRY_SKIP_WITHOUT_DEVICES(2);
  if (run_process([] { nvshmem::load_module(); }) != 0) GTEST_SKIP() << "there is no NVSHMEM, or no module";
  Group::processes(Topology({0, 1}, true)).run([](const Rank& rank) {
    cuda::check(cudaSetDevice(rank.index()), "set the device");
    const double rate = rate_of_puts(rank);
    if (rank.index() == 0) std::printf("puts, %d blocks: %.1f GB/s out of each rank\n", kBlocks, rate * 1e-9);
    Times many{};
    for (const int window : {0, 512}) {
      many = times_of(
          rank, {BackendKind::nvshmem, Hops::two, 4096, Format::bf16(), Layout::rank_major, kBlocks, window});
      print(rank, window == 0 ? "dispatch, 4,096 tokens bf16 rank_major" : "the same, with a window of 512",
            many.dispatch, "puts of its bytes", static_cast<double>(many.dispatch_bytes) / rate, 1.25);
      print(rank, "dispatch and combine", many.pair, "puts of their bytes",
            static_cast<double>(many.dispatch_bytes + many.combine_bytes) / rate, 1.25);
      if (rank.index() == 0) {
        std::printf("their send phases alone: %.1f us and %.1f us\n", many.dispatch_send * 1e6,
                    many.combine_send * 1e6);
      }
    }
    const Times plain_many = times_of(
        rank, {BackendKind::cuda, Hops::two, 4096, Format::bf16(), Layout::rank_major, kBlocks, 512});
    print(rank, "dispatch, 4,096 tokens, with a window of 512", many.dispatch, "plain stores, two hops",
          plain_many.dispatch, 1);
    const Shape few{BackendKind::nvshmem, Hops::two, 128, Format::fp8_e4m3(), Layout::expert_major, 0};
    const Times puts = times_of(rank, few);
    for (const Hops hops : {Hops::two, Hops::one}) {
      Shape plain = few;
      plain.backend = BackendKind::cuda;
      plain.hops = hops;
      const Times stores = times_of(rank, plain);
      print(rank, "dispatch fp8 and combine bf16, 128 tokens", puts.pair,
            hops == Hops::two ? "plain stores, two hops" : "plain stores, one hop", stores.pair, 1.3);
    }
    // Up to how many tokens `automatic` takes one hop: kOneHopValues.
    for (const int tokens : {1, 2, 16, 128}) {
      Shape two = few;
      two.tokens = tokens;
      Shape one = two;
      one.hops = Hops::one;
      const std::string what = "the same in one hop, " + std::to_string(tokens) + " tokens";
      print(rank, what.c_str(), times_of(rank, one).pair, "two hops", times_of(rank, two).pair, 1);
    }
  });
}

}  // namespace
}  // namespace ferry::test
